// The JSON wrapper: limits, strictness and typed reading.
#include "engine/checkpoint/json.h"

#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}

std::string Nested(size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(JsonTest, BuildsTheTreeThatTheTextDescribes) {
  const auto value = ParseJson(
      R"({"a": [1, -2, 2.5, true, null, "x\u00e9"], "b": {"c": {}, "d": []}, "e": 18446744073709551615})",
      "f");
  FQ_ASSERT_OK(value);
  EXPECT_EQ(value->dump(),
            R"({"a":[1,-2,2.5,true,null,"xé"],"b":{"c":{},"d":[]},"e":18446744073709551615})");
}

TEST(JsonTest, SingleValuesAndBlanksAreAccepted) {
  for (const char* text : {"1", " null ", "\"x\"", "\n[ ]\t"}) FQ_EXPECT_OK(ParseJson(text, "f"));
}

// M5
TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const std::string_view text :
       {std::string_view(""), std::string_view("{"), std::string_view("{}x"),
        std::string_view("{\"a\":1,}"), std::string_view("[1 2]"), std::string_view("nul"),
        std::string_view("// c\n1"), std::string_view("[NaN]"), std::string_view("[01]")}) {
    EXPECT_THAT(ParseJson(text, "f"), IsDataLoss("f: JSON: syntax error at byte")) << text;
  }
  EXPECT_THAT(ParseJson(std::string_view("{}\0{}", 5), "f"), IsDataLoss("NUL at byte 2"));
}

// M5
TEST(JsonTest, RefusesStringsThatAreNotUtf8) {
  for (const char* text : {"\"\xff\"", "\"\xc3\"", "\"\xed\xa0\x80\"", "\"\\ud800\""}) {
    EXPECT_THAT(ParseJson(text, "f"), IsDataLoss("syntax error")) << text;
  }
}

// M5
TEST(JsonTest, DepthIsLimitedWithoutRecursion) {
  FQ_EXPECT_OK(ParseJson(Nested(64), "f"));
  EXPECT_THAT(ParseJson(Nested(65), "f"), IsDataLoss("nested too deeply (limit 64"));
  EXPECT_THAT(ParseJson(Nested(1'000'000), "f"), IsDataLoss("nested too deeply"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(ParseJson(objects, "f"), IsDataLoss("nested too deeply"));
}

// M5
TEST(JsonTest, RefusesNumbersThatNoDoubleHolds) {
  for (const char* text : {"1e999", "[-1e999]", "{\"a\":1e400}"}) {
    EXPECT_THAT(ParseJson(text, "f"), IsDataLoss("number overflows"));
  }
  FQ_EXPECT_OK(ParseJson("1e-999", "f"));
}

// M5
TEST(JsonTest, RefusesDuplicateKeysEvenWhenSpelledDifferently) {
  EXPECT_THAT(ParseJson(R"({"a":1,"b":2,"a":3})", "f"), IsDataLoss("duplicate key a"));
  EXPECT_THAT(ParseJson(R"({"x":{"a":1,"\u0061":3}})", "f"), IsDataLoss("duplicate key a"));
  FQ_EXPECT_OK(ParseJson(R"({"a":{"a":1},"b":{"a":2}})", "f"));
}

TEST(JsonTest, SizeAndNumberOfValuesAreLimited) {
  JsonLimits limits;
  limits.max_bytes = 8;
  EXPECT_THAT(ParseJson("[1,2,3,4]", "f", limits), IsDataLoss("limit 8 bytes, got 9"));
  limits = JsonLimits();
  limits.max_values = 4;
  FQ_EXPECT_OK(ParseJson("[1,2,3]", "f", limits));
  EXPECT_THAT(ParseJson("[1,2,3,4]", "f", limits), IsDataLoss("too many values (limit 4"));
  limits = JsonLimits();
  limits.max_root_members = 1;
  limits.root_members_name = "tensors";
  FQ_EXPECT_OK(ParseJson(R"({"a":{"b":1,"c":2}})", "f", limits));
  EXPECT_THAT(ParseJson(R"({"a":1,"b":2})", "f", limits), IsDataLoss("too many tensors (limit 1"));
}

// An object of many objects must not take quadratic time: 200 000 members would be 2e10 steps.
TEST(JsonTest, ManyMembersTakeLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 200'000; ++i) {
    text += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":{\"a\":[1]}";
  }
  text += "}";
  const auto value = ParseJson(text, "f");
  FQ_ASSERT_OK(value);
  EXPECT_EQ(value->size(), 200'000u);
}

TEST(JsonTest, FileMustHoldAnObject) {
  const TempDir dir;
  FQ_EXPECT_OK(ReadJsonFile(dir.Write("a.json", "{}")));
  EXPECT_THAT(ReadJsonFile(dir.Write("b.json", "[]")), IsDataLoss("must be an object (got array)"));
  EXPECT_THAT(ReadJsonFile(dir.File("none.json")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.json")));
}

TEST(JsonTest, DumpReplacesInvalidUtf8InsteadOfThrowing) {
  EXPECT_EQ(DumpJson(nlohmann::json("a\xff"), -1), "\"a\xef\xbf\xbd\"");
}

class JsonObjectTest : public testing::Test {
 protected:
  JsonObject Object() {
    const auto object = JsonObject::Create(json_, "config.json");
    EXPECT_TRUE(object.ok());
    return *object;
  }
  nlohmann::json json_ = {
      {"int", 5},           {"minus", -5},       {"huge", 18446744073709551615u},
      {"float", 2.5},       {"text", "abc"},     {"yes", true},
      {"nothing", nullptr}, {"list", {1, 2, 3}}, {"inner", {{"a", 1}}}};
};

TEST_F(JsonObjectTest, ReadsTypedValuesWithinTheirRange) {
  EXPECT_EQ(*Object().GetInt("int", 1, 5), 5);
  EXPECT_EQ(*Object().GetInt("minus", -5, 5), -5);
  EXPECT_EQ(*Object().GetDouble("float", 0, 3), 2.5);
  EXPECT_EQ(*Object().GetDouble("int", 0, 5), 5.0);
  EXPECT_EQ(*Object().GetString("text"), "abc");
  EXPECT_EQ(*Object().GetBool("yes"), true);
  EXPECT_EQ((*Object().GetArray("list", 3))->size(), 3u);
  EXPECT_EQ(*Object().GetObject("inner")->GetInt("a", 0, 1), 1);
}

TEST_F(JsonObjectTest, NamesPlaceLimitAndValueOfWhatIsWrong) {
  EXPECT_THAT(Object().GetInt("int", 6, 9),
              IsDataLoss("config.json: int: out of range (limit 6..9, got 5)"));
  EXPECT_THAT(Object().GetInt("huge", 0, INT64_MAX), IsDataLoss("got 18446744073709551615"));
  EXPECT_THAT(Object().GetInt("float", 0, 9), IsDataLoss("must be an integer"));
  EXPECT_THAT(Object().GetInt("absent", 0, 9), IsDataLoss("config.json: absent: missing"));
  EXPECT_THAT(Object().GetInt("nothing", 0, 9), IsDataLoss("missing"));
  EXPECT_THAT(Object().GetDouble("float", 3, 4), IsDataLoss("limit 3..4, got 2.5"));
  EXPECT_THAT(Object().GetDouble("text", 3, 4), IsDataLoss("must be a number (got string)"));
  EXPECT_THAT(Object().GetBool("int"), IsDataLoss("must be true or false"));
  EXPECT_THAT(Object().GetString("text", 2), IsDataLoss("limit 2 bytes, got 3"));
  EXPECT_THAT(Object().GetArray("list", 2), IsDataLoss("limit 2, got 3"));
  EXPECT_THAT(Object().GetObject("inner")->GetInt("b", 0, 1),
              IsDataLoss("config.json: inner: b: missing"));
  EXPECT_THAT(JsonObject::Create(json_["list"], "x"), IsDataLoss("x: must be an object"));
}

TEST_F(JsonObjectTest, FallbackStandsInForAbsentAndNullOnly) {
  EXPECT_EQ(*Object().GetIntOr("absent", 7, 0, 9), 7);
  EXPECT_EQ(*Object().GetIntOr("nothing", 7, 0, 9), 7);
  EXPECT_EQ(*Object().GetDoubleOr("absent", 0.5, 0, 1), 0.5);
  EXPECT_EQ(*Object().GetBoolOr("absent", true), true);
  EXPECT_EQ(*Object().GetStringOr("absent", "d"), "d");
  EXPECT_THAT(Object().GetIntOr("text", 7, 0, 9), IsDataLoss("must be an integer"));
}

}  // namespace
}  // namespace flashquant
