// Copies of rows into undo records. Part of kernels_body.h.
#pragma once

#include "crash_point.h"
#include "fault.h"
#include "kernels.h"
#include "kernels_body_crc.h"
#include "kernels_vec.h"

namespace tcxl {
namespace {

constexpr uint64_t kCopyAhead = 24;

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

// What is not written non-temporally goes to the medium by the flush function: weights, and a state
// that is no short column.
TCXL_NOINLINE void flush_values(const RecordColumns& log, uint64_t record, int64_t state_floats,
                                int64_t dim, FlushFunction flush) {
  if (has_fault(Fault::kNoRecordFlush)) return;
  const float* state = log.state + record * static_cast<uint64_t>(state_floats);
  const float* weight = log.weight + record * static_cast<uint64_t>(dim);
  if (state_floats > 1) flush_part(state, state_floats, flush);
  flush_part(weight, dim, flush);
}

TCXL_NOINLINE void flush_record(const RecordColumns& log, uint64_t record, int64_t state_floats,
                                int64_t dim, FlushFunction flush) {
  if (has_fault(Fault::kNoRecordFlush)) return;
  flush(log.row + record, sizeof(uint64_t));
  flush(log.crc + record, sizeof(uint32_t));
  if (state_floats == 1) flush(log.state + record, sizeof(float));
  flush_values(log, record, state_floats, dim, flush);
}

// Where the short columns of `count` <= kGroupRows records go; the index there is the record's.
struct ShortColumns {
  uint64_t* row;
  uint32_t* crc;
  float* state;
};

// Writes the weights of `count` <= kGroupRows records and what belongs into the other columns: row
// rows[i] of the table to record records[i], and to index places[i] of `columns`. A state of more
// than one float is no short column.
TCXL_INLINE void copy_group(const TableView& table, const uint64_t* rows, const uint32_t* records,
                            const uint32_t* places, uint64_t count, const RecordColumns& log,
                            const ShortColumns& columns) {
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
    float* weight = log.weight + records[i] * stride;
    copy_floats(weight, source[i].weight, table.dim, can_stream(weight, table.dim));
    if (state_floats == 1) {
      columns.state[places[i]] = *source[i].state;
    } else if (state_floats > 1) {
      float* state = log.state + records[i] * state_stride;
      copy_floats(state, source[i].state, state_floats, can_stream(state, state_floats));
    }
    columns.row[places[i]] = source[i].row;
    columns.crc[places[i]] = crc[i];
  }
}

// Writes `count` <= kGroupRows records: row rows[i] of the table to record records[i].
TCXL_INLINE void write_group(const TableView& table, const uint64_t* rows, const uint32_t* records,
                             uint64_t count, const RecordColumns& log, FlushFunction flush) {
  copy_group(table, rows, records, records, count, log, {log.row, log.crc, log.state});
  if (flush == nullptr) return;
  for (uint64_t i = 0; i < count; ++i)
    flush_record(log, records[i], table.state_floats(), table.dim, flush);
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

// Part of a column, past the caches where it is whole lines: the log is not read again, and a line
// that is stored to would be read first.
template <typename T>
TCXL_NOINLINE void copy_column(T* to, const T* from, uint64_t count, FlushFunction flush) {
  uint64_t streams = 0;
  if (kHasStreaming && reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    streams = count * sizeof(T) / kLine * kLine / sizeof(T);
    const auto floats = static_cast<int64_t>(streams * sizeof(T) / sizeof(float));
    copy_floats(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), floats, true);
  }
  std::memcpy(to + streams, from + streams, (count - streams) * sizeof(T));
  if (flush == nullptr || has_fault(Fault::kNoRecordFlush)) return;
  if (streams > 0) streamed(to, streams * sizeof(T));
  if (streams < count) flush(to + streams, (count - streams) * sizeof(T));
}

// Record r = row rows[r] for r in [begin, end); rows up to `limit` are next and worth a prefetch.
TCXL_INLINE void copy_rows(const TableView& table, const uint64_t* rows, uint64_t begin,
                           uint64_t end, uint64_t limit, const RecordColumns& log,
                           FlushFunction flush) {
  constexpr uint64_t kRowsMax = 256;  // short columns that are gathered before they are written
  alignas(kLine) uint64_t row[kRowsMax];
  alignas(kLine) uint32_t crc[kRowsMax];
  alignas(kLine) float state[kRowsMax];
  const int64_t state_floats = table.state_floats();
  for (; begin < end; begin += kRowsMax) {
    const uint64_t count = end - begin < kRowsMax ? end - begin : kRowsMax;
    for (uint64_t i = 0; i < count; i += kGroupRows) {
      const uint64_t n = count - i < kGroupRows ? count - i : kGroupRows;
      uint32_t record[kGroupRows], place[kGroupRows];
      for (uint64_t k = 0; k < n; ++k) {
        const uint64_t r = begin + i + k, ahead = r + kCopyAhead;
        prefetch_source(table, rows[ahead < limit ? ahead : limit - 1]);
        record[k] = static_cast<uint32_t>(r);
        place[k] = static_cast<uint32_t>(i + k);
      }
      copy_group(table, rows + begin + i, record, place, n, log, {row, crc, state});
      if (flush == nullptr) continue;
      for (uint64_t k = 0; k < n; ++k) flush_values(log, record[k], state_floats, table.dim, flush);
    }
    copy_column(log.row + begin, row, count, flush);
    copy_column(log.crc + begin, crc, count, flush);
    if (state_floats == 1) copy_column(log.state + begin, state, count, flush);
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
