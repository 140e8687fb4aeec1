// Slicing-by-8: eight table look-ups per eight bytes, no special instruction needed; about 2 GB/s,
// above the disk's speed at load.
#include "kernels/base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace flashquant {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;

constexpr std::array<std::array<uint32_t, 256>, 8> MakeTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < 8; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[slice - 1][byte];
      tables[slice][byte] = (previous >> 8) ^ tables[0][previous & 0xffu];
    }
  }
  return tables;
}

constexpr std::array<std::array<uint32_t, 256>, 8> kTables = MakeTables();
static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

}  // namespace

uint32_t Crc32c(const void* data, size_t num_bytes, uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  while (num_bytes >= 8) {
    uint32_t low = 0;
    uint32_t high = 0;
    std::memcpy(&low, bytes, 4);
    std::memcpy(&high, bytes + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 0xffu] ^ kTables[6][(low >> 8) & 0xffu] ^
          kTables[5][(low >> 16) & 0xffu] ^ kTables[4][low >> 24] ^ kTables[3][high & 0xffu] ^
          kTables[2][(high >> 8) & 0xffu] ^ kTables[1][(high >> 16) & 0xffu] ^
          kTables[0][high >> 24];
    bytes += 8;
    num_bytes -= 8;
  }
  for (; num_bytes > 0; --num_bytes, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xffu];
  return ~crc;
}

}  // namespace flashquant
