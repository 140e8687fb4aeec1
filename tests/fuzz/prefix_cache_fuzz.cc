// Prefix cache over the block allocator (target F11). Input: bytes of sizes, then operations: texts
// begin, their blocks are added, they end, contents are forgotten.
//
// Properties: what a look-up gives holds exactly the salt and tokens that were asked for; a block
// with owners is never evicted; owners are counted right; no block is lost.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler/block_allocator.h"
#include "engine/scheduler/block_table.h"
#include "engine/scheduler/prefix_cache.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

constexpr int kMaxOperations = 300;

// A sequence as the cache sees it.
struct Text {
  Text(BlockAllocator* allocator, std::string text_salt, std::vector<int32_t> text_tokens)
      : salt(std::move(text_salt)), tokens(std::move(text_tokens)), blocks(allocator) {}
  std::string salt;
  std::vector<int32_t> tokens;  // whole blocks
  BlockTable blocks;
  PrefixChain chain;
};

class Run {
 public:
  explicit Run(FuzzInput input)
      : input_(input),
        block_tokens_(input_.Number(1, 3)),
        allocator_(input_.Number(2, 24)),
        cache_(&allocator_, block_tokens_) {}

  void All() {
    for (int i = 0; i < kMaxOperations && !input_.empty(); ++i) {
      Operation();
      CheckCounts();
    }
    texts_.clear();
    CheckCounts();
    Require(allocator_.num_used() == 0, "blocks are left");
    cache_.Clear();
    Require(allocator_.num_idle() == 0 && cache_.num_nodes() == 0, "contents are left");
  }

 private:
  // What a block holds: its salt and all tokens up to its end.
  using Content = std::pair<std::string, std::vector<int32_t>>;

  void Operation() {
    switch (input_.Number(0, 7)) {
      case 0:
      case 1:
      case 2:
        return Begin();
      case 3:
      case 4:
        return ExtendOne();
      case 5:
        if (!texts_.empty()) texts_.erase(texts_.begin() + AnyText());
        return;
      case 6:
        if (!texts_.empty()) ForgetBeginningOf(*texts_[static_cast<size_t>(AnyText())]);
        return;
      default:
        return cache_.Clear();
    }
  }
  int32_t AnyText() { return input_.Number(0, static_cast<int32_t>(texts_.size()) - 1); }

  Content ContentOf(const Text& text, int32_t block) const {
    const auto end = text.tokens.begin() + (block + 1) * block_tokens_;
    return {text.salt, {text.tokens.begin(), end}};
  }

  void Begin() {
    const int32_t num_blocks = input_.Number(1, 6);
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < num_blocks * block_tokens_; ++i) tokens.push_back(input_.Number(0, 1));
    auto text = std::make_unique<Text>(&allocator_, input_.Chance(4) ? "salt" : "", tokens);
    std::vector<int32_t> ids;
    const int32_t most = input_.Number(0, num_blocks);
    text->chain = cache_.Find(text->salt, text->tokens, most, &ids);
    Require(static_cast<int32_t>(ids.size()) == text->chain.num_blocks, "ids of a chain");
    Require(text->chain.num_blocks <= most, "a longer chain than asked for");
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto held = contents_.find(ids[i]);
      Require(held != contents_.end() && held->second == ContentOf(*text, static_cast<int32_t>(i)),
              "a block that holds something else");
    }
    text->blocks.Share(ids);
    const auto shared = static_cast<int32_t>(ids.size());
    const std::vector<int32_t> owned = OwnedBlocks();
    if (num_blocks > shared && !text->blocks.Grow(num_blocks - shared)) return;
    for (int32_t i = shared; i < num_blocks; ++i) {
      const int32_t id = text->blocks.ids()[static_cast<size_t>(i)];
      Require(std::find(owned.begin(), owned.end(), id) == owned.end(),
              "a block with owners was evicted");
      contents_[id] = ContentOf(*text, i);
    }
    texts_.push_back(std::move(text));
  }
  std::vector<int32_t> OwnedBlocks() const {
    std::vector<int32_t> owned;
    for (const auto& text : texts_) {
      owned.insert(owned.end(), text->blocks.ids().begin(), text->blocks.ids().end());
    }
    return owned;
  }

  void ExtendOne() {
    if (texts_.empty()) return;
    Text& text = *texts_[static_cast<size_t>(AnyText())];
    const int32_t block = text.chain.num_blocks;
    if (text.chain.broken || block >= text.blocks.num_blocks()) return;
    const int32_t id = text.blocks.ids()[static_cast<size_t>(block)];
    const std::span<const int32_t> tokens(text.tokens);
    const int32_t now = cache_.Extend(text.salt,
                                      tokens.subspan(static_cast<size_t>(block * block_tokens_),
                                                     static_cast<size_t>(block_tokens_)),
                                      id, &text.chain);
    if (now < 0) {
      Require(text.chain.broken, "refused, but not broken");
      return;
    }
    Require(contents_.at(now) == ContentOf(text, block), "the block before it held other tokens");
    if (now != id) text.blocks.Replace(block, now);
  }

  void ForgetBeginningOf(const Text& text) {
    std::vector<int32_t> ids;
    cache_.Find(text.salt, text.tokens, 1, &ids);
    if (!ids.empty()) cache_.Forget(ids.front());
    ids.clear();
    cache_.Find(text.salt, text.tokens, 1, &ids);
    Require(ids.empty(), "found after it was forgotten");
  }

  void CheckCounts() {
    Require(allocator_.num_used() + allocator_.num_idle() + allocator_.num_free() ==
                allocator_.usable_blocks(),
            "a block is lost");
    std::map<int32_t, int32_t> owners;
    for (const int32_t id : OwnedBlocks()) ++owners[id];
    Require(allocator_.num_used() == static_cast<int32_t>(owners.size()), "used blocks");
    for (const auto& [id, count] : owners) {
      Require(allocator_.references(id) == count, "owners of a block");
    }
  }

  FuzzInput input_;
  const int32_t block_tokens_;
  BlockAllocator allocator_;
  PrefixCache cache_;
  std::map<int32_t, Content> contents_;
  std::vector<std::unique_ptr<Text>> texts_;
};

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::Run({data, size}).All();
  return 0;
}
