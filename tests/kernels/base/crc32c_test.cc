// CRC-32C against published check values and a bit-by-bit computation.
#include "kernels/base/crc32c.h"

#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace flashquant {
namespace {

// Polynomial division one bit at a time, most significant bit first on reflected bytes.
uint32_t BitwiseCrc32c(const std::vector<uint8_t>& bytes) {
  const auto reflect = [](uint32_t value, int width) {
    uint32_t result = 0;
    for (int bit = 0; bit < width; ++bit) {
      if ((value >> bit & 1u) != 0) result |= 1u << (width - 1 - bit);
    }
    return result;
  };
  uint32_t crc = 0xffffffffu;
  for (const uint8_t byte : bytes) {
    crc ^= reflect(byte, 8) << 24;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 0x80000000u) != 0 ? (crc << 1) ^ 0x1EDC6F41u : crc << 1;
    }
  }
  return reflect(crc, 32) ^ 0xffffffffu;
}

std::vector<uint8_t> RandomBytes(size_t num_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(num_bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Crc32cTest, PublishedCheckValues) {
  constexpr std::string_view kDigits = "123456789";
  EXPECT_EQ(Crc32c(kDigits.data(), kDigits.size()), 0xE3069283u);
  // RFC 3720, appendix B.4: 32 bytes of zeros, of ones, rising, falling.
  std::vector<uint8_t> bytes(32, 0x00);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x8A9136AAu);
  bytes.assign(32, 0xff);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x62A8AB43u);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x46DD794Eu);
  std::iota(bytes.rbegin(), bytes.rend(), uint8_t{0});
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x113FDB5Cu);
}

TEST(Crc32cTest, EmptyInputKeepsTheCrc) {
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
  EXPECT_EQ(Crc32c(nullptr, 0, 0x12345678u), 0x12345678u);
}

TEST(Crc32cTest, EveryLengthAndAlignmentAgreesWithTheBitwiseComputation) {
  const std::vector<uint8_t> bytes = RandomBytes(100, 1);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t num_bytes = 0; num_bytes + begin <= bytes.size(); ++num_bytes) {
      const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(begin);
      const std::vector<uint8_t> part(first, first + static_cast<std::ptrdiff_t>(num_bytes));
      ASSERT_EQ(Crc32c(bytes.data() + begin, num_bytes), BitwiseCrc32c(part))
          << begin << " " << num_bytes;
    }
  }
}

TEST(Crc32cTest, ContinuingGivesTheCrcOfTheWhole) {
  const std::vector<uint8_t> bytes = RandomBytes(77, 2);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t first = Crc32c(bytes.data(), cut);
    ASSERT_EQ(Crc32c(bytes.data() + cut, bytes.size() - cut, first), whole) << cut;
  }
}

TEST(Crc32cTest, EverySingleBitChangesIt) {
  std::vector<uint8_t> bytes = RandomBytes(64, 3);
  const uint32_t crc = Crc32c(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    ASSERT_NE(Crc32c(bytes.data(), bytes.size()), crc) << bit;
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
  }
}

}  // namespace
}  // namespace flashquant
