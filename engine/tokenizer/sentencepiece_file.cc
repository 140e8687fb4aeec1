#include "engine/tokenizer/sentencepiece_file.h"

#include <bitset>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/sentencepiece.pb.h"
#include "engine/tokenizer/bpe_model.h"
#include "engine/tokenizer/unicode.h"
#include "google/protobuf/io/coded_stream.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Kind = SentencepiecePiece::Kind;

constexpr char kFile[] = "tokenizer.model";

absl::Status Unsupported(std::string_view kind, std::string_view name) {
  return UnimplementedError("{}: tokenizer: unsupported {} '{}'", kFile, kind, PrintableName(name));
}

absl::Status NotAModel(std::string_view what) {
  return DataLossError(
      "{}: {}: not a SentencePiece model, or damaged (a file of another kind under this name needs "
      "its tokenizer.json beside it)",
      kFile, what);
}

// Merges like Protobuf does when a message comes in parts.
template <typename Message>
absl::Status Merge(std::string_view bytes, std::string_view name, Message* message) {
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                                            static_cast<int>(bytes.size()));
  if (message->MergeFromCodedStream(&in) && in.ConsumedEntireMessage()) return absl::OkStatus();
  return NotAModel(name);
}

absl::StatusOr<Kind> KindOfType(int32_t type, size_t id) {
  switch (type) {
    case 1:
      return Kind::kNormal;
    case 2:
      return Kind::kUnknown;
    case 3:
      return Kind::kControl;
    case 4:
      return Kind::kUserDefined;
    case 5:  // is merged and taken apart again, in an order that depends on the text
      return Unsupported("kind of piece", "unused");
    case 6:
      return Kind::kByte;
    default:
      return DataLossError("{}: piece {}: type out of range (limit 1..6, got {})", kFile, id, type);
  }
}

bool IsUtf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const DecodedChar c = DecodeUtf8(text, pos);
    if (!c.valid) return false;
    pos += c.num_bytes;
  }
  return true;
}

absl::Status AddPiece(std::string_view bytes, SentencepieceFile* file) {
  const size_t id = file->pieces.size();
  if (static_cast<int64_t>(id) == kMaxVocabulary) {
    return DataLossError("{}: too many pieces (limit {}, got more)", kFile, kMaxVocabulary);
  }
  sentencepiece::SentencePiece message;
  FQ_RETURN_IF_ERROR(Merge(bytes, fmt::format("piece {}", id), &message));
  SentencepiecePiece piece;
  piece.score = message.score();
  piece.content = std::move(*message.mutable_piece());
  FQ_ASSIGN_OR_RETURN(piece.kind, KindOfType(message.type(), id));
  if (piece.content.empty()) return DataLossError("{}: piece {} has no text", kFile, id);
  if (static_cast<int64_t>(piece.content.size()) > kMaxTokenBytes) {
    return DataLossError("{}: piece {} too long (limit {} bytes, got {})", kFile, id,
                         kMaxTokenBytes, piece.content.size());
  }
  if (!IsUtf8(piece.content)) return DataLossError("{}: piece {} is not UTF-8", kFile, id);
  if (!std::isfinite(piece.score)) {
    return DataLossError("{}: piece {}: score must be a finite number", kFile, id);
  }
  if ((piece.kind == Kind::kByte) != (ByteOfFallback(piece.content) >= 0)) {
    return DataLossError(
        "{}: piece {} '{}': byte pieces, and only they, are spelled <0x00> to <0xFF>", kFile, id,
        PrintableName(piece.content));
  }
  file->pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::Status CheckPieces(const SentencepieceFile& file) {
  if (file.pieces.empty()) return NotAModel("no pieces");
  absl::flat_hash_set<absl::string_view> contents;
  contents.reserve(file.pieces.size());
  std::bitset<256> bytes;
  int64_t num_unknown = 0;
  for (size_t id = 0; id < file.pieces.size(); ++id) {
    const SentencepiecePiece& piece = file.pieces[id];
    if (!contents.insert(piece.content).second) {
      return DataLossError("{}: piece {} '{}' appears twice", kFile, id,
                           PrintableName(piece.content));
    }
    if (piece.kind == Kind::kUnknown) ++num_unknown;
    if (piece.kind == Kind::kByte) bytes.set(static_cast<size_t>(ByteOfFallback(piece.content)));
  }
  if (num_unknown != 1) {
    return DataLossError("{}: must have one unknown piece (got {})", kFile, num_unknown);
  }
  if (file.byte_fallback ? !bytes.all() : bytes.any()) {
    return DataLossError("{}: byte_fallback is {}, but {} of 256 byte pieces are there", kFile,
                         file.byte_fallback, bytes.count());
  }
  return absl::OkStatus();
}

absl::Status ReadTrainerSpec(const sentencepiece::TrainerSpec& spec, SentencepieceFile* file) {
  switch (spec.model_type()) {
    case 1:
      return Unsupported("model", "unigram");
    case 2:
      break;
    case 3:
      return Unsupported("model", "word");
    case 4:
      return Unsupported("model", "char");
    default:
      return Unsupported("model", fmt::format("type {}", spec.model_type()));
  }
  if (spec.treat_whitespace_as_suffix()) {
    return Unsupported("model option", "treat_whitespace_as_suffix");
  }
  file->byte_fallback = spec.byte_fallback();
  file->bos = spec.bos_piece();
  file->eos = spec.eos_piece();
  return absl::OkStatus();
}

// `decoding`: the spec is applied to decoded text, where only its character map counts.
absl::Status ReadNormalizerSpec(const sentencepiece::NormalizerSpec& spec, bool decoding,
                                SentencepieceFile* file) {
  if (!spec.precompiled_charsmap().empty()) {
    return Unsupported(decoding ? "denormalizer" : "normalizer", spec.name());
  }
  if (decoding) return absl::OkStatus();
  if (!spec.escape_whitespaces()) {
    return Unsupported("normalizer option", "escape_whitespaces off");
  }
  file->add_dummy_prefix = spec.add_dummy_prefix();
  file->remove_extra_whitespaces = spec.remove_extra_whitespaces();
  return absl::OkStatus();
}

// The messages inside the outermost one.
struct Sections {
  sentencepiece::TrainerSpec trainer;
  sentencepiece::NormalizerSpec normalizer;
  sentencepiece::NormalizerSpec denormalizer;
};

absl::Status ReadSections(std::string_view bytes, Sections* sections, SentencepieceFile* file) {
  constexpr uint32_t kLengthDelimited = 2;
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                                            static_cast<int>(bytes.size()));
  while (static_cast<size_t>(in.CurrentPosition()) < bytes.size()) {
    const uint32_t tag = in.ReadTag();
    uint32_t num_bytes = 0;
    if ((tag & 7) != kLengthDelimited || !in.ReadVarint32(&num_bytes)) {
      return NotAModel(fmt::format("after {} pieces", file->pieces.size()));
    }
    const auto begin = static_cast<size_t>(in.CurrentPosition());
    if (num_bytes > bytes.size() - begin) {
      return NotAModel(fmt::format("ends early, after {} pieces", file->pieces.size()));
    }
    const std::string_view section = bytes.substr(begin, num_bytes);
    in.Skip(static_cast<int>(num_bytes));
    switch (tag >> 3) {
      case 1:
        FQ_RETURN_IF_ERROR(AddPiece(section, file));
        break;
      case 2:
        FQ_RETURN_IF_ERROR(Merge(section, "trainer_spec", &sections->trainer));
        break;
      case 3:
        FQ_RETURN_IF_ERROR(Merge(section, "normalizer_spec", &sections->normalizer));
        break;
      case 5:
        FQ_RETURN_IF_ERROR(Merge(section, "denormalizer_spec", &sections->denormalizer));
        break;
      default:
        break;
    }
  }
  return absl::OkStatus();
}

// `content` when a control piece is called so, else "".
std::string ControlPiece(const SentencepieceFile& file, const std::string& content) {
  for (const SentencepiecePiece& piece : file.pieces) {
    if (piece.kind == Kind::kControl && piece.content == content) return content;
  }
  return "";
}

}  // namespace

absl::StatusOr<SentencepieceFile> ParseSentencepieceFile(std::string_view bytes) {
  if (bytes.size() > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return DataLossError("{}: too large (got {} bytes)", kFile, bytes.size());
  }
  SentencepieceFile file;
  Sections sections;
  FQ_RETURN_IF_ERROR(ReadSections(bytes, &sections, &file));
  if (file.pieces.empty()) return NotAModel("no pieces");
  // Kinds first: a model of another family is called unsupported, not broken.
  FQ_RETURN_IF_ERROR(ReadTrainerSpec(sections.trainer, &file));
  FQ_RETURN_IF_ERROR(ReadNormalizerSpec(sections.normalizer, /*decoding=*/false, &file));
  FQ_RETURN_IF_ERROR(ReadNormalizerSpec(sections.denormalizer, /*decoding=*/true, &file));
  FQ_RETURN_IF_ERROR(CheckPieces(file));
  for (size_t id = 0; id < file.pieces.size(); ++id) {
    if (file.pieces[id].kind == Kind::kUnknown) file.unknown_id = static_cast<int32_t>(id);
  }
  file.bos = ControlPiece(file, file.bos);
  file.eos = ControlPiece(file, file.eos);
  return file;
}

}  // namespace flashquant
