// What parsing a message would make of its bytes, before it is parsed: two bytes of an empty
// message in a list become an object of fifty.
#pragma once

#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace flashquant {

// More than any request has that Generate would accept: 1024 chat messages are three thousand.
inline constexpr int kMaxFields = 10'000;

// Whether these bytes of a message of `type` hold more than `limit` fields that would each be
// memory of their own: messages, texts and all that is unknown, at any depth. Numbers do not count,
// however many: a list of them takes no more than twice its bytes. False for bytes that are cut or
// broken before that: they cannot be parsed. Linear, takes no memory.
bool HasTooManyFields(const google::protobuf::Descriptor* type,
                      google::protobuf::io::ZeroCopyInputStream* bytes, int limit = kMaxFields);

}  // namespace flashquant
