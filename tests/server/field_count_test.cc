// Bytes that are small and would become large. The lists are hand-made: what a client's library
// would not send.
#include "server/field_count.h"

#include <string>

#include "flashquant/v1/inference.pb.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

std::string Repeated(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

// A field of the bytes `inner` in a message.
std::string Within(char tag, const std::string& inner) {
  std::string result(1, tag);
  size_t left = inner.size();
  for (; left > 127; left >>= 7) result += static_cast<char>((left & 127) | 128);
  result += static_cast<char>(left);
  return result + inner;
}

bool TooMany(const std::string& bytes, int limit) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()),
                                                7);  // values lie across pieces
  return HasTooManyFields(v1::GenerateRequest::descriptor(), &stream, limit);
}

TEST(FieldCountTest, CountsMessagesTextsAndWhatIsUnknownAtEachDepth) {
  const std::string kLists[] = {
      Within('\x2a', Repeated(std::string("\x0a\x00", 2), 9)),  // empty chat messages
      Within('\x32', Repeated(std::string("\x4a\x00", 2), 9)),  // empty biases
      Within('\x3a', Repeated(std::string("\x1a\x00", 2), 9)),  // empty stop sequences
      Within('\x2a',
             Within('\x0a', Repeated(std::string("\x7a\x00", 2), 8))),  // within one message
      Repeated(std::string("\x78\x00", 2), 10),                         // unknown numbers
      Repeated(std::string("\x7a\x00", 2), 10),                         // unknown bytes
      Repeated(std::string("\x7b\x7c", 2), 5),                          // unknown groups
      "\x7b" + Repeated(std::string("\x48\x01", 2), 8) + "\x7c",        // a priority in a group
      Repeated(std::string("\x4a\x00", 2), 10),                         // priority as bytes
      Repeated(std::string("\x5a\x00", 2), 10),                         // a text again and again
  };
  for (const std::string& bytes : kLists) {
    EXPECT_FALSE(TooMany(bytes, 10)) << testing::PrintToString(bytes);
    EXPECT_TRUE(TooMany(bytes, 9)) << testing::PrintToString(bytes);
    // The same in front of what cannot be parsed.
    EXPECT_TRUE(TooMany(bytes + "\x0a\x7f", 9)) << testing::PrintToString(bytes);
  }
}

TEST(FieldCountTest, NumbersAreAsManyAsTheyLike) {
  v1::GenerateRequest request;
  for (int i = 0; i < 100'000; ++i) request.mutable_token_ids()->add_ids(300);
  request.set_priority(3);
  EXPECT_FALSE(TooMany(request.SerializeAsString(), 1));
  // Not packed, as an encoder may send them.
  EXPECT_FALSE(TooMany(Within('\x22', Repeated(std::string("\x08\x05", 2), 1000)), 1));
}

TEST(FieldCountTest, TheLargestRequestsThatAreAcceptedAreWellWithinTheLimit) {
  v1::GenerateRequest request;
  for (int i = 0; i < 1024; ++i) {
    v1::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content("x");
  }
  for (uint32_t i = 0; i < 64; ++i) {
    v1::LogitBias* bias = request.mutable_sampling()->add_logit_bias();
    bias->set_token_id(i);
    bias->set_bias(1);
  }
  for (int i = 0; i < 8; ++i) request.mutable_stop()->add_sequences("x");
  EXPECT_FALSE(TooMany(request.SerializeAsString(), kMaxFields / 2));
}

TEST(FieldCountTest, BrokenBytesEndTheCount) {
  for (const std::string& bytes :
       {std::string("\x0a\x7fx"), std::string("\x7c\x7a\x00", 3),
        std::string("\x2a\x02\x0a\x05", 4), std::string("\x48"), std::string("\x4d\x00", 2),
        std::string("\x07"), std::string("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")}) {
    EXPECT_FALSE(TooMany(bytes, 5)) << testing::PrintToString(bytes);
  }
}

}  // namespace
}  // namespace flashquant
