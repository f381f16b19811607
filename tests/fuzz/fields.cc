#include "fields.h"

#include <cstddef>

#include "layout.h"

namespace tcxl::fuzz {

using namespace layout;

namespace {

#define TCXL_FIELD(kind, owner, type, member) \
  {Structure::kind, owner, #member, offsetof(type, member), sizeof(type::member)}
#define TCXL_SUPERBLOCK(member) TCXL_FIELD(kSuperblock, "superblock", Superblock, member)
#define TCXL_SESSION(member) TCXL_FIELD(kSession, "session", Session, member)
#define TCXL_SLOT(member) TCXL_FIELD(kSlot, "slot", Slot, member)
#define TCXL_GEOMETRY(member) TCXL_FIELD(kGeometry, "geometry", GeometryHeader, member)
#define TCXL_TABLE(member) TCXL_FIELD(kTable, "table", TableRecord, member)
#define TCXL_DESCRIPTOR(member) TCXL_FIELD(kDescriptor, "descriptor", Descriptor, member)
#define TCXL_FRAME(member) TCXL_FIELD(kFrame, "frame", FrameHeader, member)
#define TCXL_SEGMENT(kind, owner, member) TCXL_FIELD(kind, owner, FrameSegment, member)
#define TCXL_DENSE(member) TCXL_FIELD(kDense, "dense", DenseHeader, member)
#define TCXL_JOURNAL_SLOT(member) TCXL_FIELD(kJournalSlot, "journal-slot", JournalSlot, member)
#define TCXL_JOURNAL_FRAME(member) TCXL_FIELD(kJournalFrame, "journal-frame", JournalHeader, member)
#define TCXL_SEGMENTS(kind, owner)                                                       \
  TCXL_SEGMENT(kind, owner, table), TCXL_SEGMENT(kind, owner, count),                    \
      TCXL_SEGMENT(kind, owner, row_offset), TCXL_SEGMENT(kind, owner, crc_offset),      \
      TCXL_SEGMENT(kind, owner, state_offset), TCXL_SEGMENT(kind, owner, weight_offset), \
      TCXL_SEGMENT(kind, owner, state_floats), TCXL_SEGMENT(kind, owner, dim),           \
      TCXL_SEGMENT(kind, owner, done_offset)

constexpr Field kFields[] = {
    TCXL_SUPERBLOCK(magic),
    TCXL_SUPERBLOCK(major),
    TCXL_SUPERBLOCK(compat),
    TCXL_SUPERBLOCK(ro_compat),
    TCXL_SUPERBLOCK(incompat),
    TCXL_SUPERBLOCK(endian_mark),
    TCXL_SUPERBLOCK(durability),
    TCXL_SUPERBLOCK(head_bytes),
    TCXL_SUPERBLOCK(directory_entries),
    TCXL_SUPERBLOCK(crc),
    TCXL_SESSION(magic),
    TCXL_SESSION(clean),
    TCXL_SESSION(crc),
    TCXL_SLOT(magic),
    TCXL_SLOT(seq),
    TCXL_SLOT(batch),
    TCXL_SLOT(life),
    TCXL_SLOT(resume_bytes),
    TCXL_SLOT(resume_crc),
    TCXL_SLOT(dense_batch),
    TCXL_SLOT(dense_life),
    TCXL_SLOT(dense_area),
    TCXL_SLOT(dense_crc),
    TCXL_SLOT(rolling_back),
    TCXL_SLOT(journal_life),
    TCXL_SLOT(crc),
    TCXL_GEOMETRY(magic),
    TCXL_GEOMETRY(seq),
    TCXL_GEOMETRY(num_tables),
    TCXL_GEOMETRY(log_bytes),
    TCXL_GEOMETRY(data_bytes),
    TCXL_GEOMETRY(ring_offset),
    TCXL_GEOMETRY(ring_bytes),
    TCXL_GEOMETRY(frame_bytes_max),
    TCXL_GEOMETRY(crc),
    {Structure::kGeometry, "geometry", "dense_offset_0", offsetof(GeometryHeader, dense_offset), 8},
    {Structure::kGeometry, "geometry", "dense_offset_1", offsetof(GeometryHeader, dense_offset) + 8,
     8},
    {Structure::kGeometry, "geometry", "dense_bytes_0", offsetof(GeometryHeader, dense_bytes), 8},
    {Structure::kGeometry, "geometry", "dense_bytes_1", offsetof(GeometryHeader, dense_bytes) + 8,
     8},
    {Structure::kTable, "table", "name", offsetof(TableRecord, name), 8},
    TCXL_TABLE(rows),
    TCXL_TABLE(dim),
    TCXL_TABLE(optimizer),
    TCXL_TABLE(weight_offset),
    TCXL_TABLE(weight_bytes),
    TCXL_TABLE(state_offset),
    TCXL_TABLE(state_bytes),
    TCXL_DESCRIPTOR(magic),
    TCXL_DESCRIPTOR(batch),
    TCXL_DESCRIPTOR(life),
    TCXL_DESCRIPTOR(offset),
    TCXL_DESCRIPTOR(bytes),
    TCXL_DESCRIPTOR(records),
    TCXL_DESCRIPTOR(frame_crc),
    TCXL_DESCRIPTOR(crc),
    TCXL_FRAME(magic),
    TCXL_FRAME(batch),
    TCXL_FRAME(life),
    TCXL_FRAME(bytes),
    TCXL_FRAME(records),
    TCXL_FRAME(num_segments),
    TCXL_FRAME(is_fused),
    TCXL_FRAME(crc),
    TCXL_SEGMENTS(kSegment, "segment"),
    {Structure::kRow, "record", "row", 0, 8},
    {Structure::kTag, "block", "tag", 0, 8},
    TCXL_DENSE(magic),
    TCXL_DENSE(life),
    TCXL_DENSE(batch),
    TCXL_DENSE(blob_bytes),
    TCXL_DENSE(resume_bytes),
    TCXL_DENSE(resume_crc),
    TCXL_DENSE(blob_crc),
    TCXL_DENSE(crc),
    TCXL_JOURNAL_SLOT(magic),
    TCXL_JOURNAL_SLOT(seq),
    TCXL_JOURNAL_SLOT(life),
    TCXL_JOURNAL_SLOT(base),
    TCXL_JOURNAL_SLOT(ring_offset),
    TCXL_JOURNAL_SLOT(ring_bytes),
    TCXL_JOURNAL_SLOT(head),
    TCXL_JOURNAL_SLOT(first_lsn),
    TCXL_JOURNAL_SLOT(pool_life),
    TCXL_JOURNAL_SLOT(dense_batch),
    TCXL_JOURNAL_SLOT(dense_life),
    TCXL_JOURNAL_SLOT(dense_area),
    TCXL_JOURNAL_SLOT(dense_crc),
    TCXL_JOURNAL_SLOT(crc),
    TCXL_JOURNAL_FRAME(magic),
    TCXL_JOURNAL_FRAME(lsn),
    TCXL_JOURNAL_FRAME(life),
    TCXL_JOURNAL_FRAME(id),
    TCXL_JOURNAL_FRAME(kind),
    TCXL_JOURNAL_FRAME(batch),
    TCXL_JOURNAL_FRAME(bytes),
    TCXL_JOURNAL_FRAME(acked_lsn),
    TCXL_JOURNAL_FRAME(records),
    TCXL_JOURNAL_FRAME(num_segments),
    TCXL_JOURNAL_FRAME(resume_offset),
    TCXL_JOURNAL_FRAME(resume_bytes),
    TCXL_JOURNAL_FRAME(resume_crc),
    TCXL_JOURNAL_FRAME(crc),
    TCXL_SEGMENTS(kJournalSegment, "journal-segment"),
    {Structure::kJournalRow, "journal-record", "row", 0, 8},
};

}  // namespace

std::span<const Field> fields() { return kFields; }

}  // namespace tcxl::fuzz
