// A walk over tags. Only fields that the schema knows as messages are entered, so its depth is the
// schema's; unknown groups are walked through like everything else.
#include "server/field_count.h"

#include <cstdint>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"

namespace flashquant {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Kept as a number in place, or in a list of numbers.
bool IsNumber(const FieldDescriptor& field, WireFormatLite::WireType wire_type) {
  const auto type = static_cast<WireFormatLite::FieldType>(field.type());
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE ||
      field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return false;
  }
  return wire_type == WireFormatLite::WireTypeForFieldType(type) ||
         (wire_type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED && field.is_packable());
}

class Walk {
 public:
  Walk(CodedInputStream* bytes, int limit) : bytes_(bytes), left_(limit) {}

  // To the end of this message; false when there is no going on.
  bool Message(const Descriptor* type) {
    int groups = 0;  // unknown ones that are open: in them no number means what it means in `type`
    while (const uint32_t tag = bytes_->ReadTag()) {
      const auto wire_type = WireFormatLite::GetTagWireType(tag);
      const FieldDescriptor* field =
          groups > 0 ? nullptr : type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (wire_type == WireFormatLite::WIRETYPE_START_GROUP) ++groups;
      if (wire_type == WireFormatLite::WIRETYPE_END_GROUP) --groups;
      if ((field == nullptr || !IsNumber(*field, wire_type)) && --left_ < 0) return false;
      if (groups < 0 || !Value(wire_type, field)) return false;
    }
    return true;
  }
  bool too_many() const { return left_ < 0; }

 private:
  bool Value(WireFormatLite::WireType wire_type, const FieldDescriptor* field) {
    switch (wire_type) {
      case WireFormatLite::WIRETYPE_VARINT: {
        uint64_t unused = 0;
        return bytes_->ReadVarint64(&unused);
      }
      case WireFormatLite::WIRETYPE_FIXED64:
        return bytes_->Skip(8);
      case WireFormatLite::WIRETYPE_FIXED32:
        return bytes_->Skip(4);
      case WireFormatLite::WIRETYPE_START_GROUP:
      case WireFormatLite::WIRETYPE_END_GROUP:
        return true;
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return Bytes(field);
    }
    return false;
  }

  bool Bytes(const FieldDescriptor* field) {
    int num_bytes = 0;
    if (!bytes_->ReadVarintSizeAsInt(&num_bytes)) return false;
    if (field == nullptr || field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      return bytes_->Skip(num_bytes);
    }
    const CodedInputStream::Limit outer = bytes_->PushLimit(num_bytes);
    const bool whole = Message(field->message_type()) && bytes_->BytesUntilLimit() == 0;
    bytes_->PopLimit(outer);
    return whole;
  }

  CodedInputStream* const bytes_;
  int left_;
};

}  // namespace

bool HasTooManyFields(const Descriptor* type, google::protobuf::io::ZeroCopyInputStream* bytes,
                      int limit) {
  CodedInputStream input(bytes);
  Walk walk(&input, limit);
  walk.Message(type);
  return walk.too_many();
}

}  // namespace flashquant
