// A tokenizer.model put together by hand, byte by byte: written apart from the code under test,
// from the description of Protobuf's wire format and of SentencePiece's fields.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace flashquant {

inline std::string WireVarint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes.push_back(static_cast<char>(value | 128));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

inline std::string WireNumber(uint32_t field, uint64_t value) {
  return WireVarint(field << 3) + WireVarint(value);
}

inline std::string WireBytes(uint32_t field, std::string_view value) {
  return WireVarint((field << 3) | 2) + WireVarint(value.size()) + std::string(value);
}

inline std::string WireFloat(uint32_t field, float value) {
  std::string bytes = WireVarint((field << 3) | 5);
  const auto bits = std::bit_cast<uint32_t>(value);
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(bits >> (8 * i)));
  return bytes;
}

enum PieceType : uint64_t {
  kNormalPiece = 1,
  kUnknownPiece,
  kControlPiece,
  kUserPiece,
  kUnusedPiece,
  kBytePiece
};

inline std::string WirePiece(std::string_view content, float score, uint64_t type = kNormalPiece) {
  return WireBytes(1, WireBytes(1, content) + WireFloat(2, score) + WireNumber(3, type));
}

// "<unk>" 0, "<s>" 1, "</s>" 2, then the letters "a" 3, "b" 4, the visible space 5, "ab" 6.
inline std::string SmallPieces() {
  return WirePiece("<unk>", 0, kUnknownPiece) + WirePiece("<s>", 0, kControlPiece) +
         WirePiece("</s>", 0, kControlPiece) + WirePiece("a", -1) + WirePiece("b", -2) +
         WirePiece("\xE2\x96\x81", -3) + WirePiece("ab", 1);
}

// A BPE model, as which the pieces are read. No fallback to bytes.
inline std::string BpeSpec() { return WireBytes(2, WireNumber(3, 2)); }
// Spaces are kept as they are; one is put in front.
inline std::string KeepingSpec() { return WireBytes(3, WireNumber(4, 0)); }

inline std::string SmallModel() { return SmallPieces() + BpeSpec() + KeepingSpec(); }

}  // namespace flashquant
