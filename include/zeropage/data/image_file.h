// A PNG or JPEG file as a tensor, by libpng and libjpeg-turbo. The first bytes say which it is, not the name.
//
//   at::Tensor image = data::read_image("tiger.jpg");  // [3, height, width] uint8, red, green, blue
//
// Grey, palette and 16-bit images become 8-bit colour; what is transparent lies on white.
// Threads: any. Throws c10::Error that names the file: missing, another format, damaged or cut off, too large.
#pragma once

#include <cstdint>
#include <filesystem>

#include <ATen/core/TensorBody.h>

namespace zeropage::data {

// 192 MiB of pixels. A file of few bytes may claim any size.
inline constexpr int64_t kMostPixels = int64_t{64} << 20;

at::Tensor read_image(const std::filesystem::path& file, int64_t most_pixels = kMostPixels);

}  // namespace zeropage::data
