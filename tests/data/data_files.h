// Small data sets that tests write.
#pragma once

#include <cstdint>
#include <fstream>
#include <jpeglib.h>
#include <png.h>
#include <string>
#include <vector>
#include <zlib.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zeropage::testing {

inline std::string write_text(const std::string& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
  return file;
}

inline std::string write_gzipped(const std::string& file, const std::string& bytes) {
  gzFile out = gzopen(file.c_str(), "wb");
  EXPECT_EQ(gzwrite(out, bytes.data(), static_cast<unsigned>(bytes.size())),
            static_cast<int>(bytes.size()));
  gzclose(out);
  return file;
}

inline std::string big_endian_bytes(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

// type: IDX's code. values: as they are in the file.
inline std::string idx_bytes(char type, const std::vector<uint32_t>& sizes,
                             const std::string& values) {
  std::string bytes = {0, 0, type, static_cast<char>(sizes.size())};
  for (const uint32_t size : sizes) bytes += big_endian_bytes(size);
  return bytes + values;
}

// pixels: [height, width, channels] uint8. format: libpng's, such as PNG_FORMAT_RGBA.
inline std::string png_bytes(const torch::Tensor& pixels, png_uint_32 format) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = static_cast<png_uint_32>(pixels.size(0));
  image.width = static_cast<png_uint_32>(pixels.size(1));
  image.format = format;
  png_alloc_size_t size = 0;
  const void* data = pixels.const_data_ptr();
  EXPECT_TRUE(png_image_write_get_memory_size(image, size, 0, data, 0, nullptr));
  std::string bytes(size, '\0');
  EXPECT_TRUE(png_image_write_to_memory(&image, bytes.data(), &size, 0, data, 0, nullptr));
  bytes.resize(size);
  return bytes;
}

// values: of one row, 16 bits a grey pixel.
inline std::string wide_png_bytes(const std::vector<uint16_t>& values) {
  std::string bytes;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &bytes,
      [](png_structp to, png_bytep data, png_size_t size) {
        static_cast<std::string*>(png_get_io_ptr(to))->append(reinterpret_cast<char*>(data), size);
      },
      nullptr);
  png_set_IHDR(png, info, static_cast<png_uint_32>(values.size()), 1, 16, PNG_COLOR_TYPE_GRAY,
               PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  std::vector<png_byte> row;
  for (const uint16_t value : values) {
    row.push_back(static_cast<png_byte>(value >> 8));
    row.push_back(static_cast<png_byte>(value));
  }
  png_write_row(png, row.data());
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return bytes;
}

// pixels: [height, width, 3] uint8, or of four inks as Adobe's programs write them.
inline std::string jpeg_bytes(const torch::Tensor& pixels) {
  jpeg_compress_struct jpeg{};
  jpeg_error_mgr errors{};
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&jpeg, &memory, &size);
  jpeg.image_height = static_cast<JDIMENSION>(pixels.size(0));
  jpeg.image_width = static_cast<JDIMENSION>(pixels.size(1));
  jpeg.input_components = static_cast<int>(pixels.size(2));
  jpeg.in_color_space = pixels.size(2) == 4 ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, 95, TRUE);
  jpeg_start_compress(&jpeg, TRUE);
  while (jpeg.next_scanline < jpeg.image_height) {
    auto* row = pixels[static_cast<int64_t>(jpeg.next_scanline)].mutable_data_ptr<uint8_t>();
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  std::string bytes(reinterpret_cast<char*>(memory), size);
  jpeg_destroy_compress(&jpeg);
  free(memory);
  return bytes;
}

}  // namespace zeropage::testing
