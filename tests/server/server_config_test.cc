// How options are read: one order, exact refusals (C-rows).
#include "server/server_config.h"

#include <cstdio>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashquant {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

absl::StatusOr<ServerConfig> Load(std::map<std::string, std::string> flags,
                                  std::map<std::string, std::string> environment = {},
                                  const std::string& file = "") {
  flags.emplace("model.path", "some/model");
  return LoadServerConfig({std::move(flags), std::move(environment), file});
}

// What a bad value of one flag answers.
std::string Refusal(const std::string& key, const std::string& value) {
  const absl::StatusOr<ServerConfig> config = Load({{key, value}});
  if (config.ok()) return "accepted";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kFailedPrecondition);  // exit 78
  return TextOf(config.status());
}

std::string JsonRefusal(const std::string& json) {
  ServerConfig config;
  const absl::Status status = ApplyConfigJson(json, &config);
  return status.ok() ? "accepted" : TextOf(status);
}

TEST(ServerConfigTest, DefaultsAreValidOnceThereIsAModel) {
  const absl::StatusOr<ServerConfig> config = Load({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen_address, "127.0.0.1:50051");
  EXPECT_EQ(config->metrics_address, "127.0.0.1:9464");
  EXPECT_FALSE(config->reflection);
  const absl::StatusOr<ServerConfig> none = LoadServerConfig({});
  EXPECT_EQ(TextOf(none.status()), "model.path: required (--model DIR)");
}

TEST(ServerConfigTest, EveryOptionTakesItsOwnDefaultAsAText) {
  ServerConfig defaults;
  defaults.model_path = "some/model";
  std::map<std::string, std::string> flags;
  for (const ConfigOption& option : ConfigOptions()) {
    flags[option.key] = OptionText(option, defaults);
  }
  const absl::StatusOr<ServerConfig> config = Load(flags);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(DescribeConfig(*config), DescribeConfig(defaults));
}

TEST(ServerConfigTest, SizesInBytesAreReadBeyond32Bits) {
  const absl::StatusOr<ServerConfig> config = Load({{"engine.kv_cache_bytes", "5000000000"}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->kv_cache_bytes, 5000000000);
  EXPECT_THAT(Refusal("engine.kv_cache_bytes", "-1"), HasSubstr("a whole number within 0 and"));
  EXPECT_THAT(Refusal("engine.kv_cache_bytes", "99999999999999999999"), HasSubstr("must be"));
}

TEST(ServerConfigTest, UnknownKeysAreRefusedWithASuggestion) {  // C1
  EXPECT_EQ(JsonRefusal(R"({"limits": {"max_waitng": 5}})"),
            "unknown key 'limits.max_waitng', did you mean 'limits.max_waiting'?");
  EXPECT_EQ(JsonRefusal(R"({"max_waiting": 5})"),
            "unknown key 'max_waiting', did you mean 'limits.max_waiting'?");
  EXPECT_EQ(JsonRefusal(R"({"something_else_entirely": 5})"),
            "unknown key 'something_else_entirely'");
}

TEST(ServerConfigTest, KeysGivenTwiceAreRefused) {  // C1
  EXPECT_EQ(JsonRefusal(R"({"limits": {"max_waiting": 5, "max_waiting": 6}})"),
            "key 'max_waiting' given twice");
  EXPECT_EQ(JsonRefusal(R"({"log": {"level": "info"}, "log": {"level": "debug"}})"),
            "key 'log' given twice");
}

TEST(ServerConfigTest, WrongTypesAreNamedWithTheirRange) {  // C2
  EXPECT_EQ(JsonRefusal(R"({"limits": {"max_waiting": "5"}})"),
            "limits.max_waiting: must be a whole number within 1 and 1048576, got '\"5\"'");
  EXPECT_EQ(JsonRefusal(R"({"log": {"level": 3}})"),
            "log.level: must be one of debug, info, warning, error, got '3'");
  EXPECT_EQ(JsonRefusal(R"({"listen": {"reflection": "yes"}})"),
            "listen.reflection: must be true or false, got '\"yes\"'");
  EXPECT_EQ(JsonRefusal(R"({"engine": {"max_sequences": 1.5}})"),
            "engine.max_sequences: must be a whole number within 1 and 4096, got '1.5'");
  EXPECT_THAT(JsonRefusal(R"({"model": {"path": ["a"]}})"),
              HasSubstr("model.path: must be a text"));
}

TEST(ServerConfigTest, NumbersOutOfRangeAreRefused) {  // C2, C9
  EXPECT_EQ(Refusal("engine.max_sequences", "0"),
            "--max-sequences: engine.max_sequences: must be a whole number within 1 and 4096, got "
            "'0'");
  EXPECT_EQ(Refusal("engine.block_tokens", "0"),
            "--block-tokens: engine.block_tokens: must be a whole number within 1 and 256, got "
            "'0'");
  for (const char* bad : {"-1", "99999999999999999999", "abc", "", "5s", "0x10", " 5"}) {
    EXPECT_THAT(Refusal("limits.max_waiting", bad), HasSubstr("limits.max_waiting: must be"))
        << bad;
  }
  for (const char* bad : {"nan", "inf", "-0.5", "1e999", "10s"}) {
    EXPECT_THAT(Refusal("shutdown.drain_seconds", bad), HasSubstr("within 0 and 3600")) << bad;
  }
}

TEST(ServerConfigTest, DrainOverAnHourIsRefused) {  // C10
  EXPECT_EQ(Refusal("shutdown.drain_seconds", "3601"),
            "--drain-seconds: shutdown.drain_seconds: must be a number within 0 and 3600, got "
            "'3601'");
}

TEST(ServerConfigTest, MetricsPortMustDiffer) {  // C4
  EXPECT_EQ(Refusal("metrics.address", "127.0.0.1:50051"),
            "metrics.address: port 50051 is already that of listen.address");
  EXPECT_TRUE(Load({{"metrics.address", "off"}}).ok());
}

TEST(ServerConfigTest, AdminPortMustDifferAndIsNotOpenToOthers) {  // C4, C5
  EXPECT_EQ(Refusal("admin.address", "127.0.0.1:50051"),
            "admin.address: port 50051 is already that of listen.address");
  EXPECT_EQ(Refusal("admin.address", "127.0.0.1:9464"),
            "admin.address: port 9464 is already that of metrics.address");
  EXPECT_THAT(Refusal("admin.address", "0.0.0.0:50052"),
              HasSubstr("admin.address: refusing insecure bind to 0.0.0.0:50052"));
  EXPECT_TRUE(Load({{"admin.address", "127.0.0.1:50052"}}).ok());
}

TEST(ServerConfigTest, InsecureBindNeedsLeave) {  // C5
  for (const char* open : {"0.0.0.0:50051", "[::]:50051", "192.0.2.1:50051", "host.example:1"}) {
    EXPECT_THAT(Refusal("listen.address", open), HasSubstr("refusing insecure bind")) << open;
    EXPECT_TRUE(Load({{"listen.address", open}, {"listen.insecure_bind", "true"}}).ok());
  }
  for (const char* loopback : {"127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(Load({{"listen.address", loopback}}).ok()) << loopback;
  }
}

TEST(ServerConfigTest, AddressesAreHostAndPort) {  // C3
  for (const char* bad : {"50051", ":50051", "localhost", "localhost:", "localhost:65536",
                          "localhost:-1", "localhost:1x", "::1:50051"}) {
    EXPECT_THAT(Refusal("listen.address", bad), HasSubstr("listen.address: ")) << bad;
  }
}

TEST(ServerConfigTest, SlowReaderStaysBelowTheKeepaliveTimeout) {
  EXPECT_THAT(Refusal("stream.slow_reader_seconds", "20"),
              HasSubstr("must be below connection.keepalive_timeout_seconds (20), got 20"));
}

TEST(ServerConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {  // C11
  const std::string path = ::testing::TempDir() + "/server_config_order.json";
  std::ofstream(path) << R"({
    // A comment.
    "limits": {"max_waiting": 1, "max_streams_per_connection": 2},
    "engine": {"max_sequences": 3}
  })";
  const absl::StatusOr<ServerConfig> config =
      Load({{"limits.max_waiting", "10"}},
           {{"FLASHQUANT_LIMITS_MAX_WAITING", "20"},
            {"FLASHQUANT_LIMITS_MAX_STREAMS_PER_CONNECTION", "30"}},
           path);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_waiting, 10);
  EXPECT_EQ(config->max_streams_per_connection, 30);
  EXPECT_EQ(config->max_sequences, 3);
  EXPECT_EQ(config->token_budget, ServerConfig().token_budget);
  EXPECT_THAT(DescribeConfig(*config), Contains("limits.max_waiting = 10"));

  const absl::StatusOr<ServerConfig> by_variable = Load({}, {{"FLASHQUANT_CONFIG", path}});
  ASSERT_TRUE(by_variable.ok()) << by_variable.status();
  EXPECT_EQ(by_variable->max_waiting, 1);
  std::remove(path.c_str());
}

TEST(ServerConfigTest, BadEnvironmentValuesNameTheVariable) {
  const absl::StatusOr<ServerConfig> config = Load({}, {{"FLASHQUANT_LOG_LEVEL", "loud"}});
  EXPECT_EQ(TextOf(config.status()),
            "FLASHQUANT_LOG_LEVEL: log.level: must be one of debug, info, warning, error, got "
            "'loud'");
}

TEST(ServerConfigTest, UnknownVariablesWarnButThoseOfOrchestratorsDoNot) {
  const absl::StatusOr<ServerConfig> config =
      Load({}, {{"FLASHQUANT_LOG_LEVLE", "info"}, {"FLASHQUANT_SERVICE_HOST", "10.0.0.1"}});
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(
      config->warnings,
      ::testing::ElementsAre("environment variable FLASHQUANT_LOG_LEVLE is unknown and ignored"));
}

TEST(ServerConfigTest, MissingFileIsItsOwnError) {
  const absl::StatusOr<ServerConfig> config = Load({}, {}, "no/such/file.json");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);  // exit 66
}

TEST(ServerConfigTest, BrokenJsonIsRefused) {
  EXPECT_EQ(JsonRefusal("{"), "configuration: not a JSON object");
  EXPECT_EQ(JsonRefusal("[1]"), "configuration: not a JSON object");
  EXPECT_EQ(JsonRefusal(""), "configuration: not a JSON object");
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  EXPECT_EQ(JsonRefusal(deep), "configuration: nested deeper than 8");
  EXPECT_THAT(JsonRefusal(std::string((1 << 20) + 1, ' ')), HasSubstr("limit 1048576 bytes"));
}

TEST(ServerConfigTest, EveryOptionIsReachableThreeWaysAndDescribed) {
  for (const ConfigOption& option : ConfigOptions()) {
    EXPECT_THAT(ConfigOptionsMarkdown(), HasSubstr(option.flag));
    EXPECT_THAT(ConfigOptionsMarkdown(), HasSubstr(EnvironmentName(option)));
    EXPECT_NE(std::string(option.help), "");
    EXPECT_NE(std::string(option.key).find('.'), std::string::npos) << option.key;
  }
}

}  // namespace
}  // namespace flashquant
