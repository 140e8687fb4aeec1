# Every external package, with the reason it is here. All come from the distribution (docker/apt-packages.txt);
# nothing is downloaded at configure time.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)            # status, statusor, thread annotations, hash maps
find_package(fmt REQUIRED)             # text formatting; spdlog is built on it
find_package(spdlog REQUIRED)          # logging
find_package(nlohmann_json REQUIRED)   # config.json, tokenizer.json, safetensors headers
find_package(CLI11 REQUIRED)           # command line
find_package(HWY REQUIRED)             # portable SIMD with run-time dispatch (CPU backend)
find_package(prometheus-cpp REQUIRED)  # metrics registry and exposer
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)  # Unicode classes for pre-tokenizers
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)  # NFC for tokenizers that ask for it

find_package(Protobuf REQUIRED)        # wire format, tokenizer.model; module mode, Debian ships no config file

if(FQ_BUILD_SERVER)
  find_package(gRPC REQUIRED)          # server and client; used in server/ only
  find_package(OpenSSL REQUIRED)       # hashes of tokens, checks of certificates; gRPC links it already
endif()

if(FQ_BUILD_TESTS OR FQ_BUILD_FUZZ)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()
if(FQ_BUILD_BENCH)
  find_package(benchmark REQUIRED)
endif()
