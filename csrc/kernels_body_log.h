// Copies of rows into undo records. Part of kernels_body.h.
#pragma once

#include "crash_point.h"
#include "crc32c.h"
#include "fault.h"
#include "kernels.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

constexpr uint64_t kGroupRows = 4;  // records whose checksums are computed side by side
constexpr uint64_t kCopyAhead = 24;

struct RecordSource {
  uint64_t row;
  const float* state;
  const float* weight;
};

TCXL_INLINE uint64_t load_word(const float* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

TCXL_INLINE uint32_t load_half_word(const float* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

#if defined(__SSE4_2__)
// The crc32 instruction takes three cycles but one can start every cycle: four records hide the
// latency.
struct CrcGroup {
  uint64_t a, b, c, d;
  TCXL_INLINE void words(const float* const (&p)[kGroupRows], int64_t floats) {
    int64_t k = 0;
    for (; k + 2 <= floats; k += 2) {
      a = _mm_crc32_u64(a, load_word(p[0] + k));
      b = _mm_crc32_u64(b, load_word(p[1] + k));
      c = _mm_crc32_u64(c, load_word(p[2] + k));
      d = _mm_crc32_u64(d, load_word(p[3] + k));
    }
    if (k < floats) {
      a = _mm_crc32_u32(static_cast<uint32_t>(a), load_half_word(p[0] + k));
      b = _mm_crc32_u32(static_cast<uint32_t>(b), load_half_word(p[1] + k));
      c = _mm_crc32_u32(static_cast<uint32_t>(c), load_half_word(p[2] + k));
      d = _mm_crc32_u32(static_cast<uint32_t>(d), load_half_word(p[3] + k));
    }
  }
};

TCXL_INLINE void record_crcs(uint32_t start, const RecordSource (&source)[kGroupRows],
                             int64_t state_floats, int64_t dim, uint32_t (&crc)[kGroupRows]) {
  const uint64_t seed = ~start;
  CrcGroup group{_mm_crc32_u64(seed, source[0].row), _mm_crc32_u64(seed, source[1].row),
                 _mm_crc32_u64(seed, source[2].row), _mm_crc32_u64(seed, source[3].row)};
  group.words({source[0].state, source[1].state, source[2].state, source[3].state}, state_floats);
  group.words({source[0].weight, source[1].weight, source[2].weight, source[3].weight}, dim);
  crc[0] = ~static_cast<uint32_t>(group.a);
  crc[1] = ~static_cast<uint32_t>(group.b);
  crc[2] = ~static_cast<uint32_t>(group.c);
  crc[3] = ~static_cast<uint32_t>(group.d);
}
#else
TCXL_INLINE void record_crcs(uint32_t start, const RecordSource (&source)[kGroupRows],
                             int64_t state_floats, int64_t dim, uint32_t (&crc)[kGroupRows]) {
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const uint32_t row = crc32c(start, &source[i].row, sizeof(uint64_t));
    const uint32_t state = crc32c(row, source[i].state, static_cast<size_t>(state_floats) * 4);
    crc[i] = crc32c(state, source[i].weight, static_cast<size_t>(dim) * 4);
  }
}
#endif

TCXL_INLINE bool can_stream(const float* to, int64_t floats) {
  return kHasStreaming && floats % kGroup == 0 && reinterpret_cast<uintptr_t>(to) % kLine == 0;
}

// Copies one row part. Streams whole lines: the caller said so.
TCXL_INLINE void copy_floats(float* to, const float* from, int64_t floats, bool streams) {
  int64_t k = 0;
  if (streams) {
    for (; k < floats; k += kLanes) stream_vec(to + k, load_vec(from + k));
    return;
  }
  for (; k + kLanes <= floats; k += kLanes) store_vec(to + k, load_vec(from + k));
  for (; k < floats; ++k) to[k] = from[k];
}

TCXL_INLINE void flush_part(const float* to, int64_t floats, FlushFunction flush) {
  const size_t bytes = static_cast<size_t>(floats) * 4;
  if (can_stream(to, floats)) {
    streamed(to, bytes);
  } else {
    flush(to, bytes);
  }
}

// What is not written non-temporally goes to the medium by the flush function.
TCXL_NOINLINE void flush_record(const RecordColumns& log, uint64_t record, int64_t state_floats,
                                int64_t dim, FlushFunction flush) {
  if (has_fault(Fault::kNoRecordFlush)) return;
  flush(log.row + record, sizeof(uint64_t));
  flush(log.crc + record, sizeof(uint32_t));
  const float* state = log.state + record * static_cast<uint64_t>(state_floats);
  const float* weight = log.weight + record * static_cast<uint64_t>(dim);
  if (state_floats > 0) flush_part(state, state_floats, flush);
  flush_part(weight, dim, flush);
}

// Writes `count` <= kGroupRows records: row rows[i] of the table to record records[i].
TCXL_INLINE void write_group(const TableView& table, const uint64_t* rows, const uint32_t* records,
                             uint64_t count, const RecordColumns& log, FlushFunction flush) {
  const int64_t state_floats = table.state_floats();
  const auto state_stride = static_cast<uint64_t>(state_floats),
             stride = static_cast<uint64_t>(table.dim);
  RecordSource source[kGroupRows];
  for (uint64_t i = 0; i < kGroupRows; ++i) {
    const uint64_t row = rows[i < count ? i : 0];
    source[i] = {row, table.state + row * state_stride, table.weight + row * stride};
  }
  uint32_t crc[kGroupRows];
  record_crcs(log.crc_start, source, state_floats, table.dim, crc);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t record = records[i];
    float* weight = log.weight + record * stride;
    float* state = log.state + record * state_stride;
    copy_floats(weight, source[i].weight, table.dim, can_stream(weight, table.dim));
    if (state_floats == 1) {
      *state = *source[i].state;
    } else if (state_floats > 1) {
      copy_floats(state, source[i].state, state_floats, can_stream(state, state_floats));
    }
    log.row[record] = source[i].row;
    log.crc[record] = crc[i];
    if (flush != nullptr) flush_record(log, record, state_floats, table.dim, flush);
  }
}

TCXL_NOINLINE void write_records(const TableView& table, const uint64_t* rows,
                                 const uint32_t* records, uint64_t count, const RecordColumns& log,
                                 FlushFunction flush) {
  uint64_t i = 0;
  for (; i + kGroupRows <= count; i += kGroupRows) {
    write_group(table, rows + i, records + i, kGroupRows, log, flush);
  }
  if (i < count) write_group(table, rows + i, records + i, count - i, log, flush);
}

TCXL_INLINE void prefetch_source(const TableView& table, uint64_t row) {
  const int64_t state_floats = table.state_floats();
  prefetch_far(table.weight + row * static_cast<uint64_t>(table.dim), table.dim * 4);
  prefetch_far(table.state + row * static_cast<uint64_t>(state_floats), state_floats * 4);
}

// Record r = row rows[r] for r in [begin, end); rows up to `limit` are next and worth a prefetch.
TCXL_INLINE void copy_rows(const TableView& table, const uint64_t* rows, uint64_t begin,
                           uint64_t end, uint64_t limit, const RecordColumns& log,
                           FlushFunction flush) {
  for (uint64_t r = begin; r < end; r += kGroupRows) {
    const uint64_t n = end - r < kGroupRows ? end - r : kGroupRows;
    uint32_t record[kGroupRows];
    for (uint64_t k = 0; k < n; ++k) {
      const uint64_t ahead = r + k + kCopyAhead;
      prefetch_source(table, rows[ahead < limit ? ahead : limit - 1]);
      record[k] = static_cast<uint32_t>(r + k);
    }
    write_records(table, rows + r, record, n, log, flush);
  }
}

void copy_rows_to_log_kernel(const TableView& table, const uint64_t* rows,
                             const uint32_t* record_index, uint64_t count, const RecordColumns& log,
                             FlushFunction flush) {
  if (record_index == nullptr) {
    copy_rows(table, rows, 0, count, count, log, flush);
    return;
  }
  uint64_t source[kGroupRows];
  for (uint64_t i = 0; i < count; i += kGroupRows) {
    const uint64_t n = count - i < kGroupRows ? count - i : kGroupRows;
    for (uint64_t k = 0; k < n; ++k) {
      const uint64_t ahead = i + k + kCopyAhead < count ? i + k + kCopyAhead : count - 1;
      prefetch_source(table, rows[record_index[ahead]]);
      source[k] = rows[record_index[i + k]];
    }
    write_records(table, source, record_index + i, n, log, flush);
  }
}

}  // namespace
}  // namespace tcxl
