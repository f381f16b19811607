// Every byte of a pool, in one place (docs/format.md draws the same). Two spans:
//   log  : head (superblock, session, slots, resume records, frame directory, geometry), then the
//   regions that
//          the geometry names: dense areas, undo ring
//   data : the columns (weights, optimizer state) of the tables, each 2 MiB aligned
// and, for level power on an ordinary file, a third file:
//   journal : two slots, then a ring of frames; written with pwrite and fdatasync only
// All numbers little endian. Reserved bytes are zero. Checksums are crc32c over all bytes of the
// structure before the `crc` member, continued from the pool's crc seed unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tcxl::layout {

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kLine = 64;
inline constexpr uint64_t kRegionAlign = 2ull
                                         << 20;  // a huge page; the alignment device DAX asks for

inline constexpr uint64_t kSuperblockMagic = 0x4c584354504f4f4cull;  // "LOOPTCXL" as bytes
inline constexpr uint64_t kSessionMagic = 0x4e4f495353455354ull;
inline constexpr uint64_t kSlotMagic = 0x544f4c5354584354ull;
inline constexpr uint64_t kGeometryMagic = 0x4d4f4547544c5843ull;
inline constexpr uint64_t kDenseMagic = 0x45534e454454584cull;
inline constexpr uint64_t kFrameMagic = 0x454d415246544c58ull;
inline constexpr uint64_t kDescriptorMagic = 0x43534544544c5843ull;
inline constexpr uint64_t kJournalSlotMagic = 0x544c534a4c584354ull;
inline constexpr uint64_t kJournalFrameMagic = 0x4d52464a4c584354ull;

inline constexpr uint16_t kFormatMajor = 2;
inline constexpr uint16_t kCompat = 0;    // unknown bits: ignore
inline constexpr uint16_t kRoCompat = 0;  // unknown bits: read only
inline constexpr uint16_t kIncompat = 0;  // unknown bits: refuse
inline constexpr uint32_t kEndianMark = 0x01020304;

// --- head of the log span
inline constexpr uint64_t kSuperblockA = 0;
inline constexpr uint64_t kSuperblockB = kSuperblockA + kPage;
inline constexpr uint64_t kSession = kSuperblockB + kPage;
inline constexpr uint64_t kSlotA = kSession + kPage;
inline constexpr uint64_t kSlotB = kSlotA + kPage;
inline constexpr uint64_t kResumeBytesMax = 64 << 10;
inline constexpr uint64_t kResumeA = 64 << 10;
inline constexpr uint64_t kResumeB = kResumeA + kResumeBytesMax;
inline constexpr uint64_t kDirectory = 256 << 10;
inline constexpr uint64_t kDescriptorBytes = kLine;
inline constexpr uint64_t kDirectoryEntries = 4096;  // bounds the number of live undo frames
inline constexpr uint64_t kDirectoryBytes = kDirectoryEntries * kDescriptorBytes;
inline constexpr uint64_t kGeometryBytes = 1 << 20;
inline constexpr uint64_t kGeometryA = 1 << 20;
inline constexpr uint64_t kGeometryB = kGeometryA + kGeometryBytes;
inline constexpr uint64_t kHeadBytes = 4 << 20;

static_assert(kSlotB + kPage <= kResumeA);
static_assert(kResumeB + kResumeBytesMax <= kDirectory);
static_assert(kDirectory + kDirectoryBytes <= kGeometryA);
static_assert(kGeometryB + kGeometryBytes <= kHeadBytes);
static_assert(kHeadBytes % kRegionAlign == 0);

// Immutable identity; copy B is written first, copy A last: no valid copy means the pool was never
// created.
struct Superblock {
  uint64_t magic;
  uint16_t major, compat, ro_compat, incompat;
  uint32_t endian_mark;
  uint32_t durability;  // DurabilityLevel
  uint8_t uuid[16];
  uint64_t head_bytes;
  uint64_t directory_entries;
  uint64_t reserved[8];
  uint32_t reserved2;
  uint32_t crc;  // from 0, not from the crc seed (which is derived from the uuid)
};
static_assert(sizeof(Superblock) == 128);

// Whether the last writer closed the pool, and under which boot of the kernel it was opened.
struct Session {
  uint64_t magic;
  uint32_t clean;        // 1: closed; every byte of the pool was synced
  uint32_t sync_failed;  // 1: since then the kernel may call pages written that are not
  char boot_id[40];      // /proc/sys/kernel/random/boot_id, zero padded
  uint32_t reserved2;
  uint32_t crc;
};
static_assert(sizeof(Session) == 64);

// The commit: highest valid seq wins; index is seq & 1.
struct Slot {
  uint64_t magic;
  uint64_t seq;
  uint64_t batch;         // n: the committed batch
  uint64_t life;          // raised by every recovery; part of every later checksum
  uint64_t geometry_seq;  // informative
  uint32_t resume_bytes;  // in area seq & 1
  uint32_t resume_crc;
  uint64_t
      dense_batch;  // the generation that this slot vouches for whatever its life; kNoBatch: none
  uint64_t dense_life;
  uint32_t dense_area;
  uint32_t dense_crc;  // DenseHeader::crc
  uint32_t
      rolling_back;  // kExactResume or kRewinding: batches are taken back, rows are of no one batch
  uint32_t reserved3;
  uint64_t
      journal_life;  // not 0: this slot tells, not the journal, while the journal has this life
  uint64_t reserved[4];
  uint32_t reserved2;
  uint32_t crc;
};
static_assert(sizeof(Slot) == 128);
inline constexpr uint64_t kNoBatch = ~0ull;
// Slot::rolling_back: back to the newest valid generation, or to the one that the slot names.
inline constexpr uint32_t kExactResume = 1;
inline constexpr uint32_t kRewinding = 2;
// Of sequence numbers, batches, lives and lsns. No pool gets there, and one more never wraps.
inline constexpr uint64_t kCountMax = 1ull << 56;

// Undo frame of batch n: entry n % kDirectoryEntries of the directory. This line is the paper's
// flag.
struct Descriptor {
  uint64_t magic;
  uint64_t batch;
  uint64_t life;
  uint64_t offset;  // of the frame, from the start of the log span
  uint64_t bytes;   // 0: the batch changed no row
  uint64_t records;
  uint64_t reserved;
  uint32_t frame_crc;  // FrameHeader::crc
  uint32_t crc;
};
static_assert(sizeof(Descriptor) == kDescriptorBytes);

// --- geometry
// Generations of the dense part that a pool has room for: the last two, and those of the horizon.
inline constexpr uint32_t kDenseAreas = 16;
struct GeometryHeader {
  uint64_t magic;
  uint64_t seq;
  uint64_t num_tables;
  uint64_t log_bytes;   // of the log span, all regions included
  uint64_t data_bytes;  // of the data span
  uint64_t ring_offset, ring_bytes;
  uint64_t frame_bytes_max;
  uint64_t dense_offset[kDenseAreas], dense_bytes[kDenseAreas];  // page aligned; 0 bytes: none
  uint64_t reserved[7];
  uint32_t reserved2;
  uint32_t crc;  // over this header (crc = 0) and all table records
};
static_assert(sizeof(GeometryHeader) == 384);

inline constexpr uint64_t kTableNameBytes = 128;
struct TableRecord {
  char name[kTableNameBytes];  // zero padded UTF-8
  uint64_t rows;
  uint32_t dim;
  uint32_t optimizer;                    // OptimizerKind
  uint64_t weight_offset, weight_bytes;  // in the data span, float32 [rows][dim]
  uint64_t state_offset, state_bytes;    // float32 [rows][state_floats]
  uint64_t init_seed;
  uint64_t init_key;
  float init_scale;
  uint32_t has_check;  // 1: the last word of each row's state is the row's checksum
  uint32_t reserved[14];
};
static_assert(sizeof(TableRecord) == 256);
inline constexpr uint64_t kTablesMax =
    (kGeometryBytes - sizeof(GeometryHeader)) / sizeof(TableRecord);

// --- dense area: header page, resume record, blob
struct DenseHeader {
  uint64_t magic;
  uint64_t life;
  uint64_t batch;  // m
  uint64_t blob_bytes;
  uint32_t resume_bytes;
  uint32_t resume_crc;  // over the record, continued from the crc seed
  uint32_t blob_crc;    // over the blob, continued from the crc seed
  uint32_t revision;    // of a batch and life, in the order of capture
  uint32_t reserved[3];
  uint32_t crc;
};
static_assert(sizeof(DenseHeader) == 64);
inline constexpr uint64_t kDenseResume = kPage;
inline constexpr uint64_t kDenseBlob = kDenseResume + kResumeBytesMax;

// --- undo frame: header, segments, columns
// ------------------------------------------------------------------ Offsets are multiples of 64
// from the start of the frame; a frame never wraps around the end of the ring.
struct FrameHeader {
  uint64_t magic;
  uint64_t batch;
  uint64_t life;
  uint64_t bytes;
  uint64_t records;
  uint64_t num_segments;
  uint64_t is_fused;  // 1: the update writes the records; done tags say how far it came
  uint32_t reserved2;
  uint32_t crc;  // over this header (crc = 0) and all segments
};
static_assert(sizeof(FrameHeader) == kLine);

// The records of one table, as four columns (csrc/kernels.h, RecordColumns).
struct FrameSegment {
  uint64_t table;  // index in the geometry
  uint64_t count;
  uint64_t row_offset;
  uint64_t crc_offset;
  uint64_t state_offset;
  uint64_t weight_offset;
  uint32_t state_floats;
  uint32_t dim;
  uint64_t done_offset;  // tags of the blocks, used by fused frames only
};
static_assert(sizeof(FrameSegment) == kLine);

// --- journal
inline constexpr uint64_t kJournalSlots[2] = {0, kPage};  // index seq & 1
inline constexpr uint64_t kJournalRing = kRegionAlign;    // where the first ring may begin

// The base: every store of batches <= base is durable in the data span. What came after is in the
// ring, from `head` on.
struct JournalSlot {
  uint64_t magic;
  uint64_t seq;
  uint64_t life;  // of the journal: another one each time that the pool is opened
  uint64_t base;
  uint64_t ring_offset, ring_bytes;
  uint64_t head;                     // from ring_offset
  uint64_t first_lsn;                // of the frame at `head`
  uint64_t pool_life;                // Slot::life of the batches in the ring
  uint64_t dense_batch, dense_life;  // as in Slot: the generation that the base was cut with
  uint32_t dense_area, dense_crc;
  uint64_t reserved[3];
  uint32_t reserved2;
  uint32_t crc;
};
static_assert(sizeof(JournalSlot) == 128);

enum class JournalKind : uint64_t {
  kPrevious = 1,  // bytes that rows held at the base, before their first change since
  kBatch = 2,     // bytes of the rows that batch n changed, after it; its resume record: a commit
  kSkip = 3,      // nothing: the next frame did not fit before the end of the ring
};

// Page aligned, never wraps. Segments and columns as in an undo frame; checksums of records are
// continued from that of (id, life, table).
struct JournalHeader {
  uint64_t magic;
  uint64_t lsn;  // consecutive within a life
  uint64_t life;
  uint64_t id;  // another one for every frame of a life
  uint64_t kind;
  uint64_t batch;
  uint64_t bytes;      // of the frame, a multiple of a page
  uint64_t acked_lsn;  // frames up to this one were durable when this one was written
  uint64_t records;
  uint64_t num_segments;
  uint64_t resume_offset;
  uint32_t resume_bytes;
  uint32_t resume_crc;
  uint64_t reserved[3];
  uint32_t reserved2;
  uint32_t crc;  // over this header (crc = 0) and all segments
};
static_assert(sizeof(JournalHeader) == 128);

// Fused frames: records are written and tagged in blocks, each block before its rows change. As
// many rows as stay in the second-level cache between the copy and the update.
inline constexpr uint64_t fused_block_rows(uint64_t dim) {
  return dim <= 64 ? 256 : dim >= 16384 ? 1 : 16384 / dim;
}

inline constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace tcxl::layout
