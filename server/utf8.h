// Validity of UTF-8 in request fields.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace flashquant {

// Offset of the first byte that does not belong to a well-formed code point, nullopt when all do.
// Refuses overlong forms, surrogates and values above U+10FFFF.
// Source: Unicode 15, table 3-7 (well-formed UTF-8 byte sequences).
std::optional<size_t> FindInvalidUtf8(std::string_view text);

}  // namespace flashquant
