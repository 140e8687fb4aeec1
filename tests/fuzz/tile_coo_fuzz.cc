// Tile-COO file reader (target F7). The first byte chooses: odd, the rest describes a valid file
// (shape, slots) and then byte changes to it; even, the rest is a file. Its checksums are mended,
// so that the rules behind them are reached, unless the first byte is a multiple of 4.
//
// Property: no report from the sanitizers; an accepted file decodes, its slot-by-slot product
// equals that of the dense matrix, and writing it again gives an accepted file of the same slots.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kernels/format/tile_coo_decoder.h"
#include "kernels/format/tile_coo_encoder.h"
#include "kernels/format/tile_coo_file.h"

namespace flashquant {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property broken: %s\n", what);
  std::abort();
}

// Hands out bytes, then zeros.
class ByteSource {
 public:
  explicit ByteSource(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  bool empty() const { return next_ >= bytes_.size(); }
  uint8_t Byte() { return empty() ? uint8_t{0} : bytes_[next_++]; }
  uint16_t Short() {
    const uint8_t low = Byte();
    return static_cast<uint16_t>(low | Byte() << 8);
  }

 private:
  std::span<const uint8_t> bytes_;
  size_t next_ = 0;
};

template <typename T>
T Get(const std::vector<uint8_t>& bytes, size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

void MendChecksums(std::vector<uint8_t>& bytes) {
  if (bytes.size() < 256) return;
  const auto num_groups = Get<uint64_t>(bytes, 80);
  const auto groups = Get<uint64_t>(bytes, 96);
  size_t end = bytes.size();
  if (groups >= 256 && groups < end && num_groups < end) {
    const uint64_t stated = groups + 16 * (num_groups + 8);
    if (stated < end) end = static_cast<size_t>(stated);
  }
  uint32_t crc = Crc32c(bytes.data() + 256, end - 256);
  std::memcpy(bytes.data() + 136, &crc, 4);
  std::memset(bytes.data() + 140, 0, 4);
  crc = Crc32c(bytes.data(), 256);
  std::memcpy(bytes.data() + 140, &crc, 4);
}

// A valid file from 6 bytes of geometry, a slot count and 5 bytes a slot.
std::vector<uint8_t> BuildFile(ByteSource& source) {
  TileCooGeometry geometry;
  geometry.k = 1 + source.Byte() * 2;
  geometry.n = 1 + source.Byte();
  const uint8_t tiles = source.Byte();
  geometry.tile_k = 64 << (tiles % 3);
  geometry.tile_n = 64 << (tiles / 3 % 3);
  geometry.buckets_per_tile = 8 << (tiles / 9 % 4);
  const uint8_t kinds = source.Byte();
  geometry.value_type = static_cast<TileCooValueType>(kinds % 2);
  geometry.semantics = static_cast<TileCooSemantics>(kinds / 2 % 2);
  geometry.order_hint = static_cast<TileCooOrderHint>(kinds / 4 % 3);
  std::vector<TileCooSlot> slots(source.Byte());
  for (TileCooSlot& slot : slots) {
    slot.k = source.Short() % static_cast<int32_t>(geometry.k);
    slot.n = source.Byte() % static_cast<int32_t>(geometry.n);
    slot.value_bits = source.Short();
  }
  auto encoded = EncodeTileCoo(geometry, slots);
  if (!encoded.ok()) {  // a zero, a position twice: keep the shape, drop the slots
    encoded = EncodeTileCoo(geometry, {});
    Require(encoded.ok(), "the encoder takes any valid geometry");
  }
  const auto matrix = TileCooMatrix::Create(geometry, encoded->arrays);
  Require(matrix.ok(), "the validator accepts what the encoder writes");
  auto bytes = SerializeTileCooFile(*matrix, encoded->counts, 0);
  Require(bytes.ok(), "an encoded matrix can be written");
  Require(ParseTileCooFile(*bytes).ok(), "a written file is accepted");
  return *std::move(bytes);
}

void ChangeBytes(ByteSource& source, std::vector<uint8_t>& bytes) {
  while (!source.empty()) {
    const size_t offset = source.Short() % bytes.size();
    bytes[offset] = static_cast<uint8_t>(bytes[offset] ^ source.Byte());
  }
}

void CheckAccepted(const TileCooFile& file) {
  const TileCooGeometry& geometry = file.matrix.geometry();
  const auto rewritten = SerializeTileCooFile(file.matrix, file.header.counts, 0);
  Require(rewritten.ok(), "an accepted file can be written");
  const auto again = ParseTileCooFile(*rewritten);
  Require(again.ok(), "a rewritten file is accepted");
  Require(again->matrix.arrays().records == file.matrix.arrays().records, "records are kept");

  if (geometry.k * geometry.n > int64_t{1} << 20) return;  // keeps an input under a millisecond
  const auto dense = DecodeOutliers(file.matrix);
  Require(dense.ok(), "an accepted matrix decodes");
  // Integer sums of the bits: exact in any order.
  std::vector<uint64_t> sparse_sums(static_cast<size_t>(geometry.n), 0);
  std::vector<uint64_t> dense_sums(static_cast<size_t>(geometry.n), 0);
  const auto term = [](int64_t k, float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint64_t>(k + 1) * bits;
  };
  file.matrix.ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    sparse_sums[static_cast<size_t>(n)] += term(k, TileCooValue(geometry.value_type, bits));
  });
  for (size_t i = 0; i < dense->size(); ++i) {
    const auto n = i % static_cast<size_t>(geometry.n);
    dense_sums[n] += term(static_cast<int64_t>(i) / geometry.n, (*dense)[i]);
  }
  Require(sparse_sums == dense_sums, "slots and dense matrix agree");
}

void FuzzOne(std::span<const uint8_t> input) {
  if (input.empty()) return;
  const std::span<const uint8_t> rest = input.subspan(1);
  std::vector<uint8_t> bytes(rest.begin(), rest.end());
  if (input[0] % 2 == 1) {
    ByteSource source(rest);
    bytes = BuildFile(source);
    ChangeBytes(source, bytes);
    MendChecksums(bytes);
  } else if (input[0] % 4 == 2) {
    MendChecksums(bytes);
  }
  const auto file = ParseTileCooFile(bytes);
  if (file.ok()) CheckAccepted(*file);
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::FuzzOne({data, size});
  return 0;
}
