#include "zeropage/data/labelled_images.h"

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/data/data_files.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "zeropage/data/csv_file.h"
#include "zeropage/data/data_partitioner.h"
#include "zeropage/data/idx_file.h"

namespace zeropage::labelled_images_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(IdxFileTest, IsReadInEveryTypeGzippedOrNot) {
  const DiskFolder folder;
  const auto read = [&](char type, const std::vector<uint32_t>& sizes, const std::string& values) {
    const std::string bytes = idx_bytes(type, sizes, values);
    const auto plain = data::read_idx(write_text(folder.path() + "/plain", bytes));
    EXPECT_TRUE(plain.equal(data::read_idx(write_gzipped(folder.path() + "/packed", bytes))));
    return plain;
  };
  const auto bytes = read(0x08, {2, 1, 2}, {'\x00', '\x7f', '\x80', '\xff'});
  EXPECT_TRUE(bytes.equal(torch::tensor({0, 127, 128, 255}, torch::kByte).view({2, 1, 2})));
  EXPECT_TRUE(read(0x09, {1}, "\xff").equal(torch::tensor({-1}, torch::kChar)));
  EXPECT_TRUE(read(0x0B, {1}, "\xff\xfe").equal(torch::tensor({-2}, torch::kShort)));
  EXPECT_TRUE(read(0x0C, {2}, big_endian_bytes(7) + big_endian_bytes(1U << 30))
                  .equal(torch::tensor({7, 1 << 30}, torch::kInt)));
  EXPECT_TRUE(read(0x0D, {1}, big_endian_bytes(0x3fc00000)).equal(torch::tensor({1.5F})));
  EXPECT_TRUE(read(0x0E, {1}, big_endian_bytes(0xbff00000) + big_endian_bytes(0))
                  .equal(torch::tensor({-1.0}, torch::kDouble)));
}

TEST(IdxFileTest, WhatIsNoWholeIdxFileIsRefusedByName) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/images";
  const auto says = [&](const std::string& bytes) {
    write_text(file, bytes);
    return error_of([&] { data::read_idx(file); });
  };
  EXPECT_THAT(error_of([&] { data::read_idx(file); }),
              AllOf(HasSubstr(file + ": there is no such file"), HasSubstr("get_data.sh")));
  EXPECT_THAT(error_of([&] { data::read_idx(folder.path()); }), HasSubstr("got a folder"));
  EXPECT_THAT(says(""), HasSubstr("got 0 bytes of something else"));
  EXPECT_THAT(says("P6 2 2 255"), HasSubstr("expected an IDX file"));
  EXPECT_THAT(says(idx_bytes(0x0A, {1}, "x")), HasSubstr("expected an IDX type"));
  EXPECT_THAT(says(idx_bytes(0x08, {}, "x")), HasSubstr("expected 1 to 8 dimensions, got 0"));
  EXPECT_THAT(says(idx_bytes(0x08, {3}, "xyz").substr(0, 6)),
              HasSubstr("expected a header of 8 bytes, got 6"));
  EXPECT_THAT(says(idx_bytes(0x08, {3}, "xy")),
              HasSubstr("expected 3 bytes of values for sizes [3] of Byte, got 2"));
  EXPECT_THAT(says(idx_bytes(0x08, {3}, "xyzw")), HasSubstr("expected 3 bytes of values"));
  const uint32_t huge = 0xffffffff;
  EXPECT_THAT(says(idx_bytes(0x0E, {huge, huge, huge}, "x")), HasSubstr("cut off"));

  write_gzipped(file, idx_bytes(0x08, {20000}, std::string(20000, 'x')));
  std::ifstream in(file, std::ios::binary);
  const std::string packed{std::istreambuf_iterator<char>(in), {}};
  EXPECT_THAT(says(packed.substr(0, packed.size() - 12)), HasSubstr("is damaged"));
}

TEST(CsvFileTest, IsReadAndItsErrorsNameLineAndColumn) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/numbers.csv";
  const auto table = data::read_csv(write_gzipped(file, "1,2.5,-3\r\n\n 4 ,5,6e1"));
  EXPECT_TRUE(table.equal(torch::tensor({1.0F, 2.5F, -3.0F, 4.0F, 5.0F, 60.0F}).view({2, 3})));
  const auto says = [&](const std::string& text) {
    write_text(file, text);
    return error_of([&] { data::read_csv(file); });
  };
  EXPECT_THAT(says("1,2\n3,four\n"),
              HasSubstr(file + ", line 2, column 2: expected a number, got \"four\""));
  EXPECT_THAT(says("1,2\n3,\n"), HasSubstr("line 2, column 2: expected a number, got \"\""));
  EXPECT_THAT(says("1,2\n\n3\n"),
              HasSubstr("line 3: expected 2 numbers as in the first line, got 1"));
  EXPECT_THAT(says("\n"), HasSubstr("expected lines of numbers, got none"));
}

TEST(LabelledImagesTest, AreReadFromTwoIdxFilesAndFromCsvAlike) {
  const DiskFolder folder;
  std::string pixels, lines;
  for (int i = 0; i < 3 * 4; ++i) {
    pixels += static_cast<char>(20 * i);
    lines += std::to_string(20 * i) + (i % 4 == 3 ? "," + std::to_string(i / 4) + "\n" : ",");
  }
  const auto idx = data::read_idx_images(
      write_text(folder.path() + "/images", idx_bytes(8, {3, 2, 2}, pixels)),
      write_text(folder.path() + "/labels", idx_bytes(8, {3}, {'\0', '\1', '\2'})), 3);
  const auto csv = data::read_csv_images(write_text(folder.path() + "/csv", lines), {1, 2, 2}, 3);
  EXPECT_EQ(idx.images.sizes(), torch::IntArrayRef({3, 1, 2, 2}));
  EXPECT_TRUE(idx.images.equal(csv.images));
  EXPECT_TRUE(idx.labels.equal(torch::tensor({0, 1, 2}, torch::kLong)));
  EXPECT_TRUE(idx.labels.equal(csv.labels));
  EXPECT_EQ(csv.classes, 3);
  EXPECT_TRUE(csv.of({2, 0}).labels.equal(torch::tensor({2, 0}, torch::kLong)));
  EXPECT_THAT(error_of([&] { csv.of({3}); }), HasSubstr("there is no sample 3; expected 0 to 2"));
}

TEST(LabelledImagesTest, WhatMakesNoSenseIsRefusedByFileAndSample) {
  const DiskFolder folder;
  const std::string images = write_text(folder.path() + "/images", idx_bytes(8, {2, 1, 1}, "xy"));
  const std::string labels = folder.path() + "/labels";
  const auto says = [&](const std::string& bytes, int64_t classes = 10) {
    write_text(labels, bytes);
    return error_of([&] { data::read_idx_images(images, labels, classes); });
  };
  EXPECT_THAT(says(idx_bytes(8, {2}, "\1\5"), 5),
              HasSubstr(labels + ": sample 1 has label 5; expected 0 to 4"));
  EXPECT_THAT(says(idx_bytes(8, {3}, "\1\1\1")), HasSubstr("expected 2 labels, as many as"));
  EXPECT_THAT(says(idx_bytes(8, {2, 1}, "\1\1")), HasSubstr("expected labels [samples]"));
  const auto swapped = [&] { data::read_idx_images(labels, images); };
  EXPECT_THAT(error_of(swapped), HasSubstr("expected images [samples"));

  const auto csv_says = [&](const std::string& text) {
    return error_of([&] { data::read_csv_images(write_text(labels, text), {1, 1, 2}, 10); });
  };
  EXPECT_THAT(csv_says("1,2,3\n1,256,3\n"),
              HasSubstr("sample 1: expected pixels that are whole numbers from 0 to 255, got 256"));
  EXPECT_THAT(csv_says("1,2.5,3\n"), HasSubstr("got 2.5"));
  EXPECT_THAT(csv_says("1,2,3.5\n"), HasSubstr("a label that is a whole number, got 3.5"));
  EXPECT_THAT(csv_says("1,2,10\n"), HasSubstr("sample 0 has label 10; expected 0 to 9"));
  EXPECT_THAT(csv_says("1,2\n"), HasSubstr("expected lines of 3 numbers"));
}

TEST(StratifiedSplitTest, HoldsOutOfEachClassItsShareAndNoSampleTwice) {
  // 100, 50 and 11 samples of three classes, mixed.
  std::vector<int64_t> labels;
  for (int i = 0; i < 161; ++i) labels.push_back(i % 16 < 10 ? 0 : (i % 16 < 15 ? 1 : 2));
  const auto tensor = torch::tensor(labels, torch::kLong);
  const auto in_class = [&](const std::vector<int64_t>& samples, int64_t label) {
    return std::count_if(samples.begin(), samples.end(), [&](int64_t sample) {
      return labels[static_cast<size_t>(sample)] == label;
    });
  };
  for (const int64_t held_out : {1, 20, 33, 160}) {
    const auto split = data::stratified_split(tensor, held_out, /*seed=*/7);
    EXPECT_EQ(split.held_out.size(), static_cast<size_t>(held_out));
    std::set<int64_t> all(split.training.begin(), split.training.end());
    all.insert(split.held_out.begin(), split.held_out.end());
    EXPECT_EQ(all.size(), labels.size());
    EXPECT_EQ(split.training.size() + split.held_out.size(), labels.size());
    for (const int64_t label : {0, 1, 2}) {
      const double share =
          static_cast<double>(held_out) * tensor.eq(label).sum().item<double>() / 161;
      EXPECT_NEAR(static_cast<double>(in_class(split.held_out, label)), share, 1);
    }
  }
  EXPECT_NE(data::stratified_split(tensor, 20, 1).held_out,
            data::stratified_split(tensor, 20, 2).held_out);
  EXPECT_THAT(error_of([&] { data::stratified_split(tensor, 161, 1); }),
              HasSubstr("cannot hold out 161 of 161 samples; expected 1 to 160"));
}

TEST(DataPartitionerTest, GivesEverySampleToOnePartAlikeOnAllRanks) {
  for (const int parts : {1, 2, 3, 7}) {
    const auto partitioner = data::DataPartitioner::equal(100, parts, 5);
    const auto on_another_rank = data::DataPartitioner::equal(100, parts, 5);
    std::set<int64_t> all;
    for (int part = 0; part < parts; ++part) {
      const auto& samples = partitioner.use(part);
      EXPECT_EQ(samples, on_another_rank.use(part));
      EXPECT_NEAR(static_cast<double>(samples.size()), 100.0 / parts, 1);
      all.insert(samples.begin(), samples.end());
    }
    EXPECT_EQ(all.size(), 100U);
  }
  const data::DataPartitioner uneven(10, {0.7, 0.2}, 5);
  EXPECT_EQ(uneven.use(0).size(), 7U);
  EXPECT_EQ(uneven.use(1).size(), 2U);
  EXPECT_NE(uneven.use(0), data::DataPartitioner(10, {0.7, 0.2}, 6).use(0));
}

TEST(DataPartitionerTest, SizesThatMakeNoSenseAreRefused) {
  const auto says = [](int64_t samples, const std::vector<double>& sizes) {
    return error_of([&] { data::DataPartitioner(samples, sizes, 0); });
  };
  EXPECT_THAT(says(10, {0.7, 0.7}), HasSubstr("got 2 that add up to 1.4"));
  EXPECT_THAT(says(10, {1.0, 0.0}), HasSubstr("above 0 and at most 1, got 0"));
  EXPECT_THAT(says(10, {}), HasSubstr("add up to at most 1, got 0"));
  EXPECT_THAT(says(2, {0.1, 0.9}), HasSubstr("part 0 of size 0.1 of 2 samples would have none"));
  EXPECT_THAT(error_of([] { data::DataPartitioner::equal(10, 2, 0).use(2); }),
              HasSubstr("there is no part 2; expected 0 to 1"));
}

}  // namespace
}  // namespace zeropage::labelled_images_test
