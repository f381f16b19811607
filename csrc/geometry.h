// Whether a geometry can be true: every region inside its span, every table of a size that its
// shape gives. Bytes with a right checksum may still be hostile, or written by a program with other
// ideas.
#pragma once

#include <span>
#include <string>

#include "layout.h"

namespace tcxl {

// Floats beside a row's weights: optimizer state, checksum.
uint64_t state_floats(const layout::TableRecord& record);
// The first thing that is wrong with the header; empty if nothing is.
std::string geometry_fault(const layout::GeometryHeader& geometry);
// The same for the table whose record this is, in a data span of `data_bytes`.
std::string table_fault(const layout::TableRecord& record, uint64_t data_bytes);
// Whether two columns share bytes; empty if none do.
std::string overlap_fault(std::span<const layout::TableRecord> records);

}  // namespace tcxl
