// Tests of how the kernel for many rows fits its layer and its block: every layout of a legal layer
// fits the shared memory of a device of compute capability 9.0, and nothing overlaps.
#include "kernels/cuda/linear_w4a16/many_rows_plan.h"

#include <map>

#include "gtest/gtest.h"

namespace flashquant::cuda {
namespace {

constexpr int kSharedBytes = 227 * 1024 - 16;
constexpr int kRegisters = 65536;

PackedLayout Layout(int groups_per_chunk, bool zeros, int max_outlier_bytes) {
  PackedLayout layout;
  layout.num_strips = 5;
  layout.num_units = 3;
  layout.unit_dense_bytes = kUnitChunks * ChunkDenseBytes(groups_per_chunk, zeros);
  layout.max_outlier_bytes = max_outlier_bytes;
  return layout;
}

template <typename Body>
void ForAllLayers(Body&& body) {
  for (const int tile_rows : {32, 64, 96, 128}) {
    for (const int groups : {1, 2, 4}) {
      for (const bool zeros : {false, true}) {
        for (const int outlier_bytes : {0, 16, 400, 1024, 2048, kMaxPieceBytes, 32768}) {
          SCOPED_TRACE(testing::Message() << tile_rows << " rows, " << groups << " groups, zeros "
                                          << zeros << ", " << outlier_bytes << " outlier bytes");
          body(tile_rows, Layout(groups, zeros, outlier_bytes));
        }
      }
    }
  }
}

TEST(ManyRowsLayoutTest, EveryLegalLayerFits) {
  ForAllLayers([](int tile_rows, const PackedLayout& layout) {
    const ManyRowsLayout shared = LayOutManyRows(layout, tile_rows, kSharedBytes);
    EXPECT_GE(shared.raw_stages, 2);
    EXPECT_LE(shared.raw_stages, kMaxRawStages);
    EXPECT_LE(shared.num_bytes, static_cast<uint32_t>(kSharedBytes));
  });
}

TEST(ManyRowsLayoutTest, PartsFollowEachOtherAligned) {
  ForAllLayers([](int tile_rows, const PackedLayout& layout) {
    const ManyRowsLayout shared = LayOutManyRows(layout, tile_rows, kSharedBytes);
    const auto slots = static_cast<uint32_t>(shared.raw_stages * kTileStrips);
    const auto stages_of_x = static_cast<uint32_t>(XStages(tile_rows) * XStageHalves(tile_rows));
    EXPECT_EQ(shared.x_offset, static_cast<uint32_t>(TileStages(tile_rows)) * kTileChunkBytes);
    EXPECT_EQ(shared.x_offset % 1024, 0u);
    EXPECT_EQ(XHalfBytes(tile_rows) % 1024, 0u);
    EXPECT_EQ(shared.raw_offset, shared.x_offset + stages_of_x * XHalfBytes(tile_rows));
    // Copies to other places take longer.
    EXPECT_EQ((shared.raw_offset | shared.raw_strip_bytes) % 128, 0u);
    const uint32_t used = static_cast<uint32_t>(layout.unit_dense_bytes) + shared.outlier_room;
    EXPECT_GE(shared.raw_strip_bytes, used);
    EXPECT_LT(shared.raw_strip_bytes, used + 128);
    EXPECT_EQ(shared.refs_offset, shared.raw_offset + slots * shared.raw_strip_bytes);
    EXPECT_EQ(shared.barrier_offset, shared.refs_offset + slots * 8);
    EXPECT_EQ(shared.barrier_offset % 8, 0u);
  });
}

TEST(ManyRowsLayoutTest, RecordsOfOnePercentAreCopiedWhole) {
  constexpr int kOnePercent = 512;  // some 82 slots of four bytes, unevenly spread, and the trailer
  for (const int tile_rows : {32, 64, 96, 128}) {
    const PackedLayout layout = Layout(1, false, kOnePercent);
    EXPECT_EQ(LayOutManyRows(layout, tile_rows, kSharedBytes).outlier_room, kOnePercent);
  }
}

TEST(ManyRowsLayoutTest, ADeviceWithLittleSharedMemoryHasNone) {
  EXPECT_EQ(LayOutManyRows(Layout(1, false, 0), 32, 99 * 1024).raw_stages, 0);
}

TEST(ManyRowsTilesTest, TilesCoverAllChannelsAndRows) {
  const PackedLayout layout = Layout(1, false, 0);  // two tiles of channels
  for (const int m : {1, 32, 33, 64, 65, 128}) EXPECT_EQ(ManyRowsTiles(layout, m), 2) << m;
  for (const int m : {129, 256}) EXPECT_EQ(ManyRowsTiles(layout, m), 4) << m;
}

TEST(ManyRowsTilesTest, TilesHaveTheFewestEmptyRows) {
  const std::map<int, int> rows = {{1, 32},    {32, 32},   {33, 64},   {64, 64},  {65, 96},
                                   {96, 96},   {97, 128},  {128, 128}, {129, 96}, {192, 96},
                                   {193, 128}, {256, 128}, {257, 96},  {384, 128}};
  for (const auto& [m, tile_rows] : rows) EXPECT_EQ(ManyRowsTileRows(m), tile_rows) << m;
}

TEST(ManyRowsTilesTest, WhatIsReservedForManyRowsIsEnoughForFewer) {
  const PackedLayout layout = Layout(1, false, 0);
  for (int most = 1; most <= 512; ++most) {
    for (int m = 1; m <= most; ++m) {
      ASSERT_GE(ManyRowsWorkspaceFloats(most, 1), 2 * kTileN * ManyRowsTileRows(m)) << most << m;
      ASSERT_GE(ManyRowsCounters(layout, most), ManyRowsTiles(layout, m)) << most << ' ' << m;
    }
  }
}

// The kernel moves registers between warpgroups, which waits for ever for what there is not.
TEST(ManyRowsRegistersTest, RolesHaveTogetherWhatTheBlockStartsWith) {
  constexpr int kEach = kRegisters / kManyRowsThreads / 8 * 8;
  for (const int tile_rows : {32, 64, 96, 128}) {
    EXPECT_LE(DequantRegisters(tile_rows), kEach);
    EXPECT_LE(MultiplyRegisters(tile_rows) + kDequantGroups * DequantRegisters(tile_rows) +
                  kCopyRegisters,
              (kDequantGroups + 2) * kEach);
  }
}

}  // namespace
}  // namespace flashquant::cuda
