// StopMatcher: finds stop sequences in the bytes of an answer as they come, and says how many bytes
// at the end might still become one. Used on both sides: the engine thread decides with it when to
// stop, the delivery thread holds text back with it. Tokens play no role: sequences may start and
// end inside tokens.
//
// Source: Aho and Corasick 1975; the rule for several matches is reliability row T6.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashquant {

struct StopMatch {
  int32_t sequence = 0;  // index into the sequences given
  int64_t begin = 0;     // bytes [begin, end) of the answer are the sequence
  int64_t end = 0;
  bool operator==(const StopMatch&) const = default;
};

// One answer; one thread at a time. Time per byte is constant on average, memory is linear in the
// sequences. Callers limit those (8 of 1..128 bytes).
class StopMatcher final {
 public:
  // Empty sequences never match.
  explicit StopMatcher(std::span<const std::string> sequences);

  // Takes the next bytes of the answer (AnswerBytes). Returns the match that ends first among those
  // that end in `bytes`; of several that end there the longest; of equal sequences the first.
  // Matches are ignored when `counts` is false (the answer has not reached min_output_tokens): a
  // sequence counts when its last byte comes with a counting call. After a match the answer is
  // over: later calls only count bytes.
  std::optional<StopMatch> Feed(std::string_view bytes, bool counts = true);

  // Bytes at the end of the answer so far that are the beginning of a sequence: not to be shown
  // yet. 0 after a match.
  int64_t held_back() const;
  // Bytes taken so far.
  int64_t num_bytes() const { return num_bytes_; }

 private:
  struct Node {
    int32_t first_child = -1;
    int32_t next_sibling = -1;
    int32_t fail = 0;    // the longest proper suffix that is a node
    int32_t match = -1;  // the longest sequence that ends here, a suffix too; -1: none
    int32_t depth = 0;   // bytes from the root
    uint8_t byte = 0;    // on the edge from the parent
  };
  int32_t Child(int32_t node, uint8_t byte) const;
  int32_t Step(int32_t node, uint8_t byte) const;
  void LinkSuffixes();

  std::vector<Node> nodes_;  // 0: root; parents come before children
  std::vector<int64_t> sequence_bytes_;
  int32_t state_ = 0;
  int64_t num_bytes_ = 0;
  bool matched_ = false;
};

}  // namespace flashquant
