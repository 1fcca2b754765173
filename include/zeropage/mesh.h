// The ranks of a world as a grid with named axes.
//
//   Mesh mesh(world, {{"pipeline", 2}, {"data", 4}, {"tensor", 2}});
//   mesh["data"].communicator().all_reduce(gradient, ReduceOp::kMean, "a gradient").wait();
//
// Row-major, as the axes are listed: neighbours along the last one are neighbours in the world. If a launcher
// numbers the ranks of a host in a row, the last axes lie within hosts, and their ranks use shared memory.
//
// An axis is a world of its own, over the ranks that have this one's place on all other axes: by World::split()'s
// rules, in the order of their places. An axis as long as the world is the world itself, but for "context" and
// "expert", whose messages then have worlds of their own.
//
// A Mesh is a handle: copies share its worlds. The last copy closes them; every rank should drop its own at the
// same point of the program.
// Threads: as World.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zeropage/world.h"

namespace zeropage::comm {

struct MeshAxis {
  std::string name = {};
  int size = 1;  // ranks along it
};

class Mesh {
 public:
  // Collective. Throws on all ranks alike where the axes differ between ranks, a size is not positive, the sizes do not
  // multiply to the world's, or a name is empty or twice there.
  Mesh(const World& world, std::vector<MeshAxis> axes);

  // The ranks along that axis, with this one's place as its rank. Throws for an axis that there is not.
  const World& operator[](std::string_view axis) const;

  // The ranks that have different tokens, and over which a model is sharded: those along "data", and along "context" and
  // "expert" where there are those axes (zeropage/context_parallel.h, expert_parallel.h). Throws where there is none.
  const World& samples() const;
  // The ranks of samples() with this one's place along "expert", which have the same experts. Throws where there is no such axis.
  const World& same_experts() const;

  const World& world() const { return world_; }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  bool has(std::string_view axis) const;

 private:
  World along(const std::vector<std::string_view>& names) const;

  World world_;
  std::vector<MeshAxis> axes_;
  std::vector<World> along_;      // by axis
  std::optional<World> samples_;  // none: as along the only axis of them
  std::optional<World> same_experts_;
};

}  // namespace zeropage::comm
