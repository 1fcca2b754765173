#include "zeropage/data/image_folder.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/data/data_files.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "zeropage/data/idx_file.h"
#include "zeropage/data/transforms.h"

namespace zeropage::image_folder_test {
namespace {

namespace fs = std::filesystem;
using namespace zeropage::testing;
using data::SampleRandom;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// [height, width, channels], smooth, so that JPEG keeps it nearly.
torch::Tensor picture(int64_t height, int64_t width, int64_t channels = 3) {
  const auto rows = torch::arange(height).view({-1, 1, 1}) * 9;
  const auto columns = torch::arange(width).view({1, -1, 1}) * 5;
  const auto colours = torch::arange(channels).view({1, 1, -1}) * 20;
  return (rows + columns + colours).clamp(0, 255).to(torch::kByte).contiguous();
}

torch::Tensor as_image(const torch::Tensor& pixels) {
  return pixels.permute({2, 0, 1});
}

TEST(ImageFileTest, PngsOfAllKindsAndJpegsBecomeEightBitColour) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/image";
  const auto read = [&](const std::string& bytes) {
    return data::read_image(write_text(file, bytes));
  };
  const auto rgb = picture(12, 9);
  EXPECT_TRUE(read(png_bytes(rgb, PNG_FORMAT_RGB)).equal(as_image(rgb)));
  const auto grey = picture(12, 9, 1);
  EXPECT_TRUE(read(png_bytes(grey, PNG_FORMAT_GRAY)).equal(as_image(grey).expand({3, 12, 9})));
  auto clear = torch::cat({rgb, torch::full({12, 9, 1}, 255, torch::kByte)}, 2).contiguous();
  EXPECT_TRUE(read(png_bytes(clear, PNG_FORMAT_RGBA)).equal(as_image(rgb)));
  clear.select(2, 3).zero_();
  EXPECT_TRUE(read(png_bytes(clear, PNG_FORMAT_RGBA)).eq(255).all().item<bool>()) << "on white";
  const auto jpeg = read(jpeg_bytes(rgb));
  EXPECT_LT((jpeg.to(torch::kFloat) - as_image(rgb).to(torch::kFloat)).abs().max().item<float>(),
            24);
}

TEST(ImageFileTest, PngsOf16BitsKeepTheirBrightness) {
  const DiskFolder folder;
  const auto image = data::read_image(
      write_text(folder.path() + "/image", wide_png_bytes({0, 257, 32768, 65535})));
  const auto expected = torch::tensor({0, 1, 128, 255}, torch::kByte).expand({3, 1, 4});
  EXPECT_TRUE(image.equal(expected)) << image;
}

TEST(ImageFileTest, JpegsOfFourInksBecomeColours) {
  const DiskFolder folder;
  const auto rgb = picture(12, 9);
  const auto inks = torch::cat({rgb, torch::full({12, 9, 1}, 255, torch::kByte)}, 2).contiguous();
  const auto image = data::read_image(write_text(folder.path() + "/image", jpeg_bytes(inks)));
  EXPECT_LT((image.to(torch::kFloat) - as_image(rgb).to(torch::kFloat)).abs().max().item<float>(),
            24);
  const auto black = torch::zeros({12, 9, 4}, torch::kByte);
  EXPECT_LT(data::read_image(write_text(folder.path() + "/image", jpeg_bytes(black)))
                .max()
                .item<uint8_t>(),
            4);
}

TEST(ImageFileTest, WhatIsBrokenOrTooLargeIsRefusedByName) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/image";
  const auto says = [&](const std::string& bytes, int64_t most = data::kMostPixels) {
    return error_of([&] { data::read_image(write_text(file, bytes), most); });
  };
  const std::string png = png_bytes(picture(40, 30), PNG_FORMAT_RGB),
                    jpeg = jpeg_bytes(picture(40, 30));
  EXPECT_THAT(says(png.substr(0, png.size() / 2)), HasSubstr(file + ": is no whole PNG"));
  EXPECT_THAT(says(png.substr(0, 20)), HasSubstr("is no whole PNG"));
  EXPECT_THAT(says(jpeg.substr(0, jpeg.size() - 40)),
              HasSubstr(file + ": is no whole JPEG: it is cut off"));
  EXPECT_THAT(says(jpeg.substr(0, 3)), HasSubstr("is no whole JPEG"));
  EXPECT_THAT(says("GIF89a"),
              HasSubstr("expected a PNG or JPEG file, got 6 bytes of something else"));
  EXPECT_THAT(says(png, 1199), HasSubstr("expected at most 1199 pixels, got 30 x 40"));
  EXPECT_THAT(says(jpeg, 1199), HasSubstr("expected at most 1199 pixels, got 30 x 40"));
  EXPECT_EQ(says(jpeg, 1200), "");
}

TEST(ImageFileTest, AnyDamageIsReadOrRefusedButNeverCrashes) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/image";
  const std::vector<std::string> whole = {png_bytes(picture(20, 15), PNG_FORMAT_RGB),
                                          jpeg_bytes(picture(20, 15)),
                                          idx_bytes(8, {2, 3}, "abcdef")};
  int refused = 0;
  for (int64_t round = 0; round < 3000; ++round) {
    SampleRandom random(5, 0, round);
    std::string bytes = whole[static_cast<size_t>(round) % whole.size()];
    for (int64_t i = random.below(4); i >= 0; --i) {
      const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size())));
      bytes[at] = static_cast<char>(random.below(256));
    }
    if (random.coin(0.3))
      bytes.resize(static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size()))));
    write_text(file, bytes);
    const std::string error = error_of([&] {
      if (round % 3 == 2) {
        data::read_idx(file);
      } else {
        EXPECT_EQ(data::read_image(file, 100'000).size(0), 3);
      }
    });
    EXPECT_TRUE(error.empty() || error.starts_with(file)) << error;
    refused += error.empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 1000);
}

// Two classes, three samples that can be read, and what is none.
void write_classes(const std::string& root) {
  fs::create_directories(root + "/tools/small");
  fs::create_directories(root + "/animals");
  write_text(root + "/tools/small/saw.PNG", png_bytes(picture(40, 20), PNG_FORMAT_RGB));
  write_text(root + "/tools/hammer.png", png_bytes(picture(8, 8), PNG_FORMAT_RGB));
  write_text(root + "/tools/broken.png", "no image");
  write_text(root + "/tools/README.txt", "no image either");
  write_text(root + "/animals/tiger.jpeg", jpeg_bytes(picture(8, 8)));
  fs::create_symlink("tiger.jpeg", root + "/animals/cat.jpeg");
  write_text(root + "/notes.png", "in no class");
}

TEST(ImageFolderTest, ClassesAreFoldersAndBrokenFilesAreNamedAndNoSamples) {
  const DiskFolder folder;
  write_classes(folder.path());
  for (const int threads : {1, 3}) {
    const data::ImageFolder images(folder.path(), {.short_side = 10, .threads = threads});
    EXPECT_THAT(images.classes(), ElementsAre("animals", "tools"));
    ASSERT_EQ(images.size(), 3);
    EXPECT_TRUE(images.labels().equal(torch::tensor({0, 1, 1}, torch::kLong)));
    EXPECT_EQ(images.path(0).filename(), "tiger.jpeg");
    EXPECT_EQ(images.path(1).filename(), "hammer.png");
    EXPECT_EQ(images.path(2).filename(), "saw.PNG");
    EXPECT_EQ(images.image(1).sizes(), torch::IntArrayRef({3, 8, 8})) << "is small as it is";
    EXPECT_EQ(images.image(2).sizes(), torch::IntArrayRef({3, 20, 10}));
    EXPECT_THAT(images.skipped(),
                ElementsAre(HasSubstr("cat.jpeg: is a link to "),
                            HasSubstr("/tools/broken.png: expected a PNG or JPEG file")));
    EXPECT_THAT(error_of([&] { images.image(3); }),
                HasSubstr("there is no sample 3; expected 0 to 2"));
  }
}

TEST(ImageFolderTest, ImagesInFilesAreThoseInMemoryAndABrokenOneIsNamedWhereItIsUsed) {
  const DiskFolder folder;
  write_classes(folder.path());
  const data::ImageFolder memory(folder.path(), {.short_side = 10});
  const data::ImageFolder files(folder.path(),
                                {.images_in = data::ImagesIn::kFiles, .short_side = 10});
  ASSERT_EQ(files.size(), 4) << "the broken one too";
  EXPECT_THAT(files.skipped(), ElementsAre(HasSubstr("cat.jpeg: is a link to ")));
  EXPECT_THAT(error_of([&] { files.image(1); }),
              HasSubstr("/tools/broken.png: expected a PNG or JPEG file"));
  for (const auto& [in_files, in_memory] : {std::pair{0, 0}, {2, 1}, {3, 2}}) {
    EXPECT_EQ(files.path(in_files), memory.path(in_memory));
    EXPECT_TRUE(files.image(in_files).equal(memory.image(in_memory)));
  }
}

TEST(ImageFolderTest, LinksToImagesAndClassesAreFollowedAndNoImageComesTwice) {
  const DiskFolder folder;
  write_classes(folder.path() + "/all");
  const std::string subset = folder.path() + "/subset";
  fs::create_directories(subset + "/tools");
  fs::create_symlink("../../all/tools/hammer.png", subset + "/tools/linked.png");
  fs::create_symlink("../../all/tools/none.png", subset + "/tools/none.png");
  fs::create_symlink("../../all/tools/small", subset + "/tools/more");
  fs::create_symlink("../all/animals", subset + "/animals");
  const data::ImageFolder images(subset, {.short_side = 10});
  EXPECT_THAT(images.classes(), ElementsAre("animals", "tools"));
  ASSERT_EQ(images.size(), 2);
  EXPECT_EQ(images.path(0).filename(), "tiger.jpeg");
  EXPECT_EQ(images.path(1).filename(), "linked.png");
  EXPECT_THAT(images.skipped(),
              ::testing::UnorderedElementsAre(
                  HasSubstr("cat.jpeg: is a link to " + subset + "/animals/tiger.jpeg"),
                  HasSubstr("none.png: is a link to a file that is not there"),
                  HasSubstr("more: is a link to a folder within a class")));
}

TEST(ImageFolderTest, ImagesOfOtherFormatsAreCountedAndNamed) {
  const DiskFolder folder;
  write_classes(folder.path());
  for (const char* name : {"a.webp", "b.WEBP", "c.bmp"}) {
    write_text(folder.path() + "/animals/" + name, "no PNG");
  }
  const data::ImageFolder images(folder.path(), {.images_in = data::ImagesIn::kFiles});
  EXPECT_EQ(images.size(), 4);
  EXPECT_THAT(images.skipped(),
              ::testing::Contains(AllOf(HasSubstr("/animals: 2 files that end in .webp are passed "
                                                  "over, such as "),
                                        HasSubstr("expected PNG or JPEG, convert them"))));
  EXPECT_THAT(images.skipped(), ::testing::Contains(HasSubstr("/animals: 1 files")));
}

TEST(ImageFolderTest, AFolderThatCannotBeTrainedOnIsRefused) {
  const DiskFolder folder;
  const auto says = [&] { return error_of([&] { data::ImageFolder images(folder.path()); }); };
  EXPECT_THAT(error_of([&] { data::ImageFolder images(folder.path() + "/none"); }),
              HasSubstr("/none: there is no such folder"));
  EXPECT_THAT(error_of([&] { data::ImageFolder images(write_text(folder.path() + "/file", "")); }),
              HasSubstr("got a file"));
  fs::create_directories(folder.path() + "/one");
  EXPECT_THAT(says(), HasSubstr("expected at least two folders, one a class, got 1"));
  fs::create_directories(folder.path() + "/two");
  write_text(folder.path() + "/two/image.png", png_bytes(picture(4, 4), PNG_FORMAT_RGB));
  EXPECT_THAT(says(),
              AllOf(HasSubstr("/one: expected PNG or JPEG files that can be read, got none")));
  write_text(folder.path() + "/one/image.png", "");
  EXPECT_THAT(says(),
              HasSubstr("the first that could not be: " + folder.path() + "/one/image.png"));
}

TEST(TransformsTest, ATransformedImageIsOfSeedEpochAndSample) {
  const auto augment =
      data::chain({data::random_resized_crop(16), data::random_flip(),
                   data::colour_jitter({.brightness = 0.4, .contrast = 0.4, .saturation = 0.4}),
                   data::random_crop(16, 2), data::normalise({0.5, 0.4, 0.3}, {0.2, 0.2, 0.2})});
  const auto image = as_image(picture(30, 40));
  const auto before = image.clone();
  const auto once = augment(image, SampleRandom(1, 2, 3));
  EXPECT_EQ(once.sizes(), torch::IntArrayRef({3, 16, 16}));
  EXPECT_EQ(once.scalar_type(), torch::kFloat);
  EXPECT_TRUE(once.is_contiguous());
  EXPECT_TRUE(once.equal(augment(image, SampleRandom(1, 2, 3))));
  EXPECT_FALSE(once.equal(augment(image, SampleRandom(1, 3, 3))));
  EXPECT_FALSE(once.equal(augment(image, SampleRandom(1, 2, 4))));
  EXPECT_TRUE(image.equal(before));
}

TEST(TransformsTest, EachDoesWhatItSays) {
  const auto image = as_image(picture(6, 8));
  const SampleRandom random(0, 0, 0);
  const auto as_fp32 = image.to(torch::kFloat) / 255;
  EXPECT_TRUE(data::chain({})(image, random).allclose(as_fp32));
  EXPECT_TRUE(data::chain({data::random_flip(1)})(image, random).allclose(as_fp32.flip(2)));
  EXPECT_TRUE(data::chain({data::random_flip(0)})(image, random).allclose(as_fp32));
  EXPECT_TRUE(data::centre_crop(4)(image, random).equal(image.narrow(1, 1, 4).narrow(2, 2, 4)));
  EXPECT_TRUE(data::normalise({0.5}, {0.25})(as_fp32, random).allclose((as_fp32 - 0.5) / 0.25));
  EXPECT_EQ(data::resize(3)(image, random).sizes(), torch::IntArrayRef({3, 3, 4}));
  EXPECT_EQ(data::random_resized_crop(5)(image.narrow(1, 0, 1), random).sizes(),
            torch::IntArrayRef({3, 5, 5}));
  const auto darker = data::colour_jitter({.brightness = 1})(as_fp32, random);
  const auto factor = darker.sum() / as_fp32.sum();
  EXPECT_TRUE(darker.allclose((as_fp32 * factor).clamp(0, 1), 1e-3, 1e-3) ||
              factor.item<float>() > 1);

  // What a transform draws depends on its place, and not on what the ones before it draw.
  const auto crop_after = [&](const data::Transform& before) {
    return data::chain({before, data::random_crop(6, 3)})(image, SampleRandom(3, 0, 1));
  };
  EXPECT_TRUE(crop_after(data::random_flip(0)).equal(crop_after(data::normalise({0}, {1}))));

  // Every place of the padded image comes, and the padding is black.
  std::vector<bool> seen(9);
  for (int64_t sample = 0; sample < 200; ++sample) {
    const auto crop = data::random_crop(4, 1)(torch::full({1, 4, 4}, 9, torch::kByte),
                                              SampleRandom(0, 0, sample));
    const auto row = crop[0].sum(1), column = crop[0].sum(0);
    const auto place = [](const torch::Tensor& sums) {
      return sums[0].item<int>() == 0 ? 0 : (sums[3].item<int>() == 0 ? 2 : 1);
    };
    seen[static_cast<size_t>(3 * place(row) + place(column))] = true;
  }
  EXPECT_THAT(seen, ::testing::Each(true));
}

TEST(TransformsTest, WhatMakesNoSenseIsRefused) {
  const SampleRandom random(0, 0, 0);
  const auto image = as_image(picture(6, 8));
  EXPECT_THAT(error_of([&] { data::random_crop(9, 1)(image, random); }),
              HasSubstr("cannot cut 9 x 9 from an image [3, 6, 8] with a padding of 1"));
  EXPECT_THAT(error_of([&] { data::centre_crop(7)(image, random); }),
              HasSubstr("resize() it first"));
  EXPECT_THAT(error_of([&] { data::chain({})(image.to(torch::kInt), random); }),
              HasSubstr("of uint8 or fp32, got Int"));
  EXPECT_THAT(error_of([&] {
                data::normalise({0, 0}, {1, 1})(image, random);
              }),
              HasSubstr("has 2 means"));
  EXPECT_THAT(error_of([] { data::normalise({0}, {0}); }), HasSubstr("deviations above 0"));
  EXPECT_THAT(error_of([] { data::random_flip(2); }), HasSubstr("probability from 0 to 1, got 2"));
  EXPECT_THAT(error_of([] {
                data::random_resized_crop(8, {.area = {0.5, 0.1}});
              }),
              HasSubstr("from low to high"));
  EXPECT_THAT(error_of([&] { data::colour_jitter({})(image.narrow(0, 0, 1), random); }),
              HasSubstr("three channels"));
}

}  // namespace
}  // namespace zeropage::image_folder_test
