#include "engine/tokenizer/bpe_model.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/unicode.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

// The byte-level alphabet: printable Latin-1 bytes stand for themselves, the rest for U+0100 on.
struct ByteAlphabet {
  std::array<uint32_t, 256> char_of{};
  std::array<int16_t, 512> byte_of{};  // -1: not in the alphabet

  ByteAlphabet() {
    byte_of.fill(-1);
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      char_of[b] = printable ? b : next++;
      byte_of[char_of[b]] = static_cast<int16_t>(b);
    }
  }
};

const ByteAlphabet& Alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

uint64_t PairKey(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

}  // namespace

std::optional<std::string> BytesOfSpelling(std::string_view spelled) {
  std::string bytes;
  bytes.reserve(spelled.size());
  for (size_t pos = 0; pos < spelled.size();) {
    const DecodedChar c = DecodeUtf8(spelled, pos);
    if (!c.valid || c.code_point >= 512) return std::nullopt;
    const int16_t byte = Alphabet().byte_of[c.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    pos += c.num_bytes;
  }
  return bytes;
}

std::string SpellingOfBytes(std::string_view bytes) {
  std::string spelled;
  for (const char c : bytes) AppendUtf8(Alphabet().char_of[static_cast<uint8_t>(c)], &spelled);
  return spelled;
}

int ByteOfFallback(std::string_view content) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (content.size() != 6 || content.substr(0, 3) != "<0x" || content[5] != '>') return -1;
  const int high = digit(content[3]);
  const int low = digit(content[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

absl::StatusOr<BpeModel> BpeModel::Create(std::vector<VocabularyEntry> entries,
                                          const std::vector<MergeRule>& merges,
                                          const Options& options) {
  BpeModel model;
  model.alphabet_ = options.alphabet;
  model.byte_fallback_ = options.byte_fallback;
  model.fuse_unk_ = options.fuse_unk;
  FQ_RETURN_IF_ERROR(model.AddEntries(std::move(entries), options));
  if (options.alphabet == BpeAlphabet::kCharacters) {
    FQ_RETURN_IF_ERROR(model.CheckAlphabet(options));
  } else if (!options.may_drop_bytes && model.num_missing_bytes() > 0) {
    return UnimplementedError("{}: tokenizer: unsupported unk_token ({} bytes have no token)",
                              options.file, model.num_missing_bytes());
  }
  FQ_RETURN_IF_ERROR(model.AddMerges(merges, options));
  return model;
}

absl::Status BpeModel::AddEntries(std::vector<VocabularyEntry> entries, const Options& options) {
  const std::string where = options.file + ": model.vocab";
  if (entries.empty()) return DataLossError("{}: empty", where);
  if (static_cast<int64_t>(entries.size()) > kMaxVocabulary) {
    return DataLossError("{}: too many tokens (limit {}, got {})", where, kMaxVocabulary,
                         entries.size());
  }
  int32_t max_id = 0;
  for (const VocabularyEntry& entry : entries) {
    if (entry.id < 0 || entry.id >= kMaxVocabulary) {
      return DataLossError("{}: id out of range (limit {}, got {})", where, kMaxVocabulary,
                           entry.id);
    }
    if (entry.content.empty()) return DataLossError("{}: id {} has no text", where, entry.id);
    if (static_cast<int64_t>(entry.content.size()) > kMaxTokenBytes) {
      return DataLossError("{}: id {} too long (limit {} bytes, got {})", where, entry.id,
                           kMaxTokenBytes, entry.content.size());
    }
    max_id = std::max(max_id, entry.id);
  }
  token_bytes_.resize(static_cast<size_t>(max_id) + 1);
  has_id_.resize(token_bytes_.size());
  id_by_content_.reserve(entries.size());
  byte_ids_.fill(-1);
  const absl::flat_hash_set<int32_t> control(options.control.begin(), options.control.end());
  for (VocabularyEntry& entry : entries) {
    const auto id = static_cast<size_t>(entry.id);
    if (has_id_[id]) return DataLossError("{}: id {} appears twice", where, entry.id);
    has_id_[id] = true;
    AddSpelling(entry, control.contains(entry.id), options);
    if (!id_by_content_.emplace(std::move(entry.content), entry.id).second) {
      return DataLossError("{}: the token of id {} appears twice", where, entry.id);
    }
  }
  return absl::OkStatus();
}

void BpeModel::AddSpelling(const VocabularyEntry& entry, bool is_control, const Options& options) {
  std::optional<std::string> bytes;
  std::string& shown = token_bytes_[static_cast<size_t>(entry.id)];
  if (options.alphabet == BpeAlphabet::kBytes) {
    bytes = BytesOfSpelling(entry.content);
    shown = bytes.value_or(entry.content);
    if (bytes && bytes->size() == 1) byte_ids_[static_cast<uint8_t>((*bytes)[0])] = entry.id;
  } else if (const int byte = options.byte_fallback ? ByteOfFallback(entry.content) : -1;
             byte >= 0) {
    byte_ids_[static_cast<size_t>(byte)] = entry.id;
    shown.assign(1, static_cast<char>(byte));
  } else {
    bytes = entry.content;
    shown = options.shown_pattern.empty()
                ? entry.content
                : ReplaceAll(entry.content, options.shown_pattern, options.shown_content);
  }
  if (bytes && options.ignore_merges && !is_control) id_by_bytes_.emplace(*bytes, entry.id);
}

absl::Status BpeModel::CheckAlphabet(const Options& options) {
  if (options.byte_fallback && num_missing_bytes() > 0) {
    return UnimplementedError("{}: tokenizer: unsupported byte_fallback ({} bytes have no token)",
                              options.file, num_missing_bytes());
  }
  if (options.unk_token.empty()) return absl::OkStatus();
  const std::optional<int32_t> unk = TokenId(options.unk_token);
  if (!unk) {
    return DataLossError("{}: model.unk_token: '{}' is not in the vocabulary", options.file,
                         options.unk_token);
  }
  unk_id_ = *unk;
  return absl::OkStatus();
}

absl::Status BpeModel::AddMerges(const std::vector<MergeRule>& merges, const Options& options) {
  const std::string where = options.file + ": model.merges";
  if (static_cast<int64_t>(merges.size()) > kMaxMerges) {
    return DataLossError("{}: too many merges (limit {}, got {})", where, kMaxMerges,
                         merges.size());
  }
  rank_by_pair_.reserve(merges.size());
  merged_by_rank_.reserve(merges.size());
  const absl::flat_hash_set<int32_t> control(options.control.begin(), options.control.end());
  for (const auto& [left, right] : merges) {
    const size_t rank = merged_by_rank_.size();
    const std::optional<int32_t> left_id = TokenId(left);
    const std::optional<int32_t> right_id = TokenId(right);
    const std::optional<int32_t> merged_id = TokenId(left + right);
    if (!left_id || !right_id || !merged_id) {
      return DataLossError("{}: merge {} {} a token that is not in the vocabulary", where, rank,
                           left_id && right_id ? "makes" : "names");
    }
    if (control.contains(*merged_id)) {
      return DataLossError("{}: merge {} makes the special token {}", where, rank, *merged_id);
    }
    if (!rank_by_pair_.emplace(PairKey(*left_id, *right_id), static_cast<uint32_t>(rank)).second) {
      return DataLossError("{}: merge {} appears twice", where, rank);
    }
    merged_by_rank_.push_back(*merged_id);
  }
  return absl::OkStatus();
}

std::optional<int32_t> BpeModel::TokenId(std::string_view content) const {
  const auto it = id_by_content_.find(absl::string_view(content.data(), content.size()));
  if (it == id_by_content_.end()) return std::nullopt;
  return it->second;
}

bool BpeModel::HasId(int32_t id) const {
  return id >= 0 && id < vocab_size() && has_id_[static_cast<size_t>(id)];
}

int BpeModel::num_missing_bytes() const {
  return static_cast<int>(std::count(byte_ids_.begin(), byte_ids_.end(), -1));
}

uint32_t BpeModel::RankOf(int32_t left, int32_t right) const {
  const auto it = rank_by_pair_.find(PairKey(left, right));
  return it == rank_by_pair_.end() ? kNoMerge : it->second;
}

void BpeModel::EncodePiece(std::string_view piece, MergeScratch* scratch,
                           std::vector<int32_t>* ids) const {
  if (!id_by_bytes_.empty()) {
    const auto it = id_by_bytes_.find(absl::string_view(piece.data(), piece.size()));
    if (it != id_by_bytes_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  scratch->ids.clear();
  if (alphabet_ == BpeAlphabet::kCharacters) {
    AppendCharacters(piece, &scratch->ids);
  } else {
    for (const char c : piece) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
      if (id >= 0) scratch->ids.push_back(id);
    }
  }
  if (scratch->ids.size() > 1) Merge(scratch);
  ids->insert(ids->end(), scratch->ids.begin(), scratch->ids.end());
}

void BpeModel::AppendCharacters(std::string_view piece, std::vector<int32_t>* ids) const {
  bool after_unk = false;
  for (size_t pos = 0; pos < piece.size();) {
    const DecodedChar c = DecodeUtf8(piece, pos);
    const std::string_view text = piece.substr(pos, c.num_bytes);
    pos += c.num_bytes;
    const std::optional<int32_t> id = c.valid ? TokenId(text) : std::nullopt;
    const bool is_unk = !id && !byte_fallback_;
    if (id) {
      ids->push_back(*id);
    } else if (byte_fallback_) {
      for (const char byte : text) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    } else if (unk_id_ >= 0 && !(fuse_unk_ && after_unk)) {
      ids->push_back(unk_id_);
    }
    after_unk = is_unk;
  }
}

void BpeModel::Merge(MergeScratch* scratch) const {
  std::vector<int32_t>& ids = scratch->ids;
  const std::vector<uint32_t>& next = scratch->next;
  MergeSymbols(
      static_cast<uint32_t>(ids.size()), [&](uint32_t i) { return RankOf(ids[i], ids[next[i]]); },
      [&](uint32_t i, uint32_t rank) { ids[i] = merged_by_rank_[rank]; }, scratch);
  uint32_t num_left = 0;
  for (uint32_t i = 0; i != kNoSymbol; i = next[i]) ids[num_left++] = ids[i];
  ids.resize(num_left);
}

}  // namespace flashquant
