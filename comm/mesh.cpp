#include "zeropage/mesh.h"

#include <algorithm>
#include <utility>

#include "zeropage/check.h"

namespace zeropage::comm {
namespace {

constexpr std::string_view kData = "data";
constexpr std::string_view kContext = "context";
constexpr std::string_view kExpert = "expert";

// "pipeline" 2, "data" 4
std::string list_of(const std::vector<MeshAxis>& axes) {
  std::string list;
  for (const MeshAxis& axis : axes) {
    list += c10::str(list.empty() ? "" : ", ", '"', axis.name, "\" ", axis.size);
  }
  return list;
}

// "" if they are the axes of a world of that size.
std::string what_is_wrong(const std::vector<MeshAxis>& axes, int world_size) {
  if (axes.empty()) {
    return c10::str("expected an axis or more, got none; name one, as {\"data\", ", world_size,
                    "}");
  }
  int64_t ranks = 1;
  for (size_t index = 0; index < axes.size(); ++index) {
    const MeshAxis& axis = axes[index];
    if (axis.name.empty()) return c10::str("axis ", index, " has no name; name it, as \"data\"");
    if (axis.size < 1) {
      return c10::str("axis \"", axis.name, "\": expected 1 rank or more, got ", axis.size);
    }
    const auto is_same = [&](const MeshAxis& other) { return other.name == axis.name; };
    if (std::count_if(axes.begin(), axes.end(), is_same) != 1) {
      return c10::str("the axis name \"", axis.name,
                      "\" is there twice; choose another for one of them");
    }
    // Past the world's size it is wrong whatever follows, and may not overflow.
    if (ranks <= world_size) ranks *= axis.size;
  }
  if (ranks == world_size) return "";
  return c10::str("the axes ", list_of(axes), " need ", ranks > world_size ? "more than " : "",
                  ranks > world_size ? world_size : ranks, " ranks, but the world has ", world_size,
                  "; make their sizes multiply to it");
}

void check_axes(const World& world, const std::vector<MeshAxis>& axes) {
  std::vector<std::string> lines = {c10::str("axes: ", list_of(axes))};
  world.check_agreement("the mesh", lines);
  const std::string wrong = what_is_wrong(axes, world.size());
  if (wrong.empty()) return;
  // Rank 0 may serve the store, and ends with the error. An answer that has words is waited for.
  world.settle("the mesh", wrong, [](const std::vector<std::string>& texts) { return texts[0]; });
  ZP_THROW("Mesh: ", wrong);
}

}  // namespace

Mesh::Mesh(const World& world, std::vector<MeshAxis> axes) : world_(world), axes_(std::move(axes)) {
  check_axes(world_, axes_);
  for (const MeshAxis& axis : axes_) along_.push_back(along({axis.name}));
  const auto is_long = [&](std::string_view axis) { return has(axis) && (*this)[axis].size() > 1; };
  if (is_long(kContext) || is_long(kExpert)) samples_ = along({kData, kContext, kExpert});
  if (has(kExpert)) same_experts_ = along({kData, kContext});
}

// The ranks that have this one's place on all other axes.
World Mesh::along(const std::vector<std::string_view>& names) const {
  std::vector<int> ranks = {world_.rank()};
  std::string where;
  int stride = world_.size();  // between neighbours along an axis
  for (const MeshAxis& axis : axes_) {
    stride /= axis.size;
    if (std::find(names.begin(), names.end(), axis.name) == names.end()) continue;
    where += c10::str(where.empty() ? " along " : " and ", '"', axis.name, '"');
    const int place = world_.rank() / stride % axis.size;
    std::vector<int> further;
    for (const int rank : ranks) {
      for (int other = 0; other < axis.size; ++other) {
        further.push_back(rank + (other - place) * stride);
      }
    }
    ranks = std::move(further);
  }
  // Messages of a forward do not wait behind gradients of the same ranks.
  const bool is_of_forward =
      (names == std::vector{kContext} || names == std::vector{kExpert}) && ranks.size() > 1;
  if (static_cast<int>(ranks.size()) == world_.size() && !is_of_forward) return world_;
  return world_.subset(ranks, world_.where() + where);
}

const World& Mesh::samples() const {
  if (samples_) return *samples_;
  if (has(kData)) return (*this)[kData];
  return (*this)[has(kContext) ? kContext : kExpert];
}

const World& Mesh::same_experts() const {
  ZP_CHECK(same_experts_, "Mesh: there is no axis \"expert\" among ", list_of(axes_));
  return *same_experts_;
}

const World& Mesh::operator[](std::string_view axis) const {
  const auto at = std::find_if(axes_.begin(), axes_.end(),
                               [axis](const MeshAxis& known) { return known.name == axis; });
  ZP_CHECK(at != axes_.end(), "Mesh: there is no axis \"", axis, "\" among ", list_of(axes_));
  return along_[static_cast<size_t>(at - axes_.begin())];
}

bool Mesh::has(std::string_view axis) const {
  return std::any_of(axes_.begin(), axes_.end(),
                     [axis](const MeshAxis& known) { return known.name == axis; });
}

}  // namespace zeropage::comm
