// CRC-32C (Castagnoli): reflected polynomial 82F63B78, start and final XOR FFFFFFFF.
//
// Source: design "Tile-COO format" 8.5; "123456789" gives E3069283.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashquant {

// CRC of `num_bytes` bytes at `data`, continuing from the CRC of what came before (0 at the start).
// Crc32c(b, n, Crc32c(a, m)) is the CRC of a followed by b.
uint32_t Crc32c(const void* data, size_t num_bytes, uint32_t crc = 0);

}  // namespace flashquant
