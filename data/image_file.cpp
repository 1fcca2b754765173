#include "zeropage/data/image_file.h"

#include <array>
#include <csetjmp>
#include <cstdio>
#include <string>
#include <string_view>

#include <ATen/ops/empty.h>
// After cstdio, which it needs and does not include.
#include <jerror.h>
#include <jpeglib.h>
#include <png.h>

#include "data/detail/file_bytes.h"
#include "zeropage/check.h"

namespace zeropage::data {
namespace {

constexpr std::string_view kPngBegin = "\x89PNG\r\n\x1a\n";
constexpr std::string_view kJpegBegin = "\xff\xd8\xff";

// [height, width, 3] uint8, for an image that may have that size.
at::Tensor image_memory(const std::string& name, int64_t height, int64_t width,
                        int64_t most_pixels) {
  ZP_CHECK(height >= 1 && width >= 1 && height <= most_pixels / width, name, ": expected at most ",
           most_pixels, " pixels, got ", width, " x ", height);
  return at::empty({height, width, 3}, at::kByte);
}

at::Tensor decode_png(const std::string& name, const std::string& bytes, int64_t most_pixels) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  const bool has_header = png_image_begin_read_from_memory(&image, bytes.data(), bytes.size()) != 0;
  ZP_CHECK(has_header, name, ": is no whole PNG: ", image.message);
  at::Tensor pixels;
  try {
    pixels = image_memory(name, image.height, image.width, most_pixels);
  } catch (...) {
    png_image_free(&image);
    throw;
  }
  // Else libpng takes 16 bits a channel for linear light, and brightens them.
  if ((image.format & PNG_FORMAT_FLAG_LINEAR) != 0) image.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  image.format = PNG_FORMAT_RGB;
  const png_color white = {255, 255, 255};
  // Frees the image, whatever it returns.
  const bool is_whole = png_image_finish_read(&image, &white, pixels.mutable_data_ptr<uint8_t>(),
                                              /*row_stride=*/0, /*colormap=*/nullptr) != 0;
  ZP_CHECK(is_whole, name, ": is no whole PNG: ", image.message);
  return pixels;
}

// libjpeg's errors, which leave by longjmp: nothing on the way may have a destructor.
struct JpegErrors {
  jpeg_error_mgr manager;  // first, as libjpeg hands out its address
  std::jmp_buf leave;
  bool ends_early;
  std::array<char, JMSG_LENGTH_MAX> message;
};

JpegErrors& errors_of(j_common_ptr jpeg) {
  return *reinterpret_cast<JpegErrors*>(jpeg->err);
}

void leave_jpeg(j_common_ptr jpeg) {
  JpegErrors& errors = errors_of(jpeg);
  jpeg->err->format_message(jpeg, errors.message.data());
  std::longjmp(errors.leave, 1);
}

// Warnings are told to nobody, but the one that the rest of the image is made up.
void note_jpeg_message(j_common_ptr jpeg, int level) {
  if (level < 0 && jpeg->err->msg_code == JWRN_JPEG_EOF) errors_of(jpeg).ends_early = true;
}

// A row of four inks as three colours. Adobe's programs write inks inverted.
void to_colours(const uint8_t* inks, int64_t width, bool is_inverted, uint8_t* colours) {
  for (int64_t x = 0; x < width; ++x, inks += 4, colours += 3) {
    for (int channel = 0; channel < 3; ++channel) {
      const int ink = is_inverted ? inks[channel] : 255 - inks[channel];
      const int black = is_inverted ? inks[3] : 255 - inks[3];
      colours[channel] = static_cast<uint8_t>((ink * black + 127) / 255);
    }
  }
}

struct JpegSize {
  int64_t height = 0;
  int64_t width = 0;
};

// Reads the header where `pixels` is null, else the image. False: errors.message says why.
bool run_jpeg(const std::string& bytes, JpegErrors& errors, JpegSize& size, uint8_t* pixels) {
  jpeg_decompress_struct jpeg{};
  jpeg.err = jpeg_std_error(&errors.manager);
  errors.manager.error_exit = leave_jpeg;
  errors.manager.emit_message = note_jpeg_message;
  if (setjmp(errors.leave) != 0) {
    jpeg_destroy_decompress(&jpeg);
    return false;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&jpeg, TRUE);
  size = {jpeg.image_height, jpeg.image_width};
  if (pixels != nullptr) {
    const bool has_inks = jpeg.jpeg_color_space == JCS_CMYK || jpeg.jpeg_color_space == JCS_YCCK;
    jpeg.out_color_space = has_inks ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(&jpeg);
    const size_t row_bytes = size_t{3} * jpeg.output_width;
    // libjpeg frees it.
    JSAMPARRAY inks = nullptr;
    if (has_inks) {
      inks = jpeg.mem->alloc_sarray(reinterpret_cast<j_common_ptr>(&jpeg), JPOOL_IMAGE,
                                    jpeg.output_width * 4, 1);
    }
    while (jpeg.output_scanline < jpeg.output_height) {
      JSAMPROW row = pixels + row_bytes * jpeg.output_scanline;
      jpeg_read_scanlines(&jpeg, has_inks ? inks : &row, 1);
      if (has_inks) to_colours(inks[0], jpeg.output_width, jpeg.saw_Adobe_marker != FALSE, row);
    }
    jpeg_finish_decompress(&jpeg);
  }
  jpeg_destroy_decompress(&jpeg);
  return true;
}

at::Tensor decode_jpeg(const std::string& name, const std::string& bytes, int64_t most_pixels) {
  JpegErrors errors{};
  JpegSize size;
  ZP_CHECK(run_jpeg(bytes, errors, size, nullptr), name,
           ": is no whole JPEG: ", errors.message.data());
  const at::Tensor pixels = image_memory(name, size.height, size.width, most_pixels);
  ZP_CHECK(run_jpeg(bytes, errors, size, pixels.mutable_data_ptr<uint8_t>()), name,
           ": is no whole JPEG: ", errors.message.data());
  ZP_CHECK(!errors.ends_early, name, ": is no whole JPEG: it is cut off");
  return pixels;
}

}  // namespace

at::Tensor read_image(const std::filesystem::path& file, int64_t most_pixels) {
  const std::string name = file.string();
  const std::string bytes = detail::read_file_bytes(file);
  at::Tensor pixels;
  if (bytes.starts_with(kPngBegin)) {
    pixels = decode_png(name, bytes, most_pixels);
  } else if (bytes.starts_with(kJpegBegin)) {
    pixels = decode_jpeg(name, bytes, most_pixels);
  } else {
    ZP_THROW(name, ": expected a PNG or JPEG file, got ", bytes.size(), " bytes of something else");
  }
  return pixels.permute({2, 0, 1}).contiguous();
}

}  // namespace zeropage::data
