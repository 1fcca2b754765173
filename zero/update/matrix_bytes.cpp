#include "zero/update/matrix_bytes.h"

namespace zeropage::zero {

MatrixBytes matrix_bytes(const ParameterPages& pages, const std::vector<OwnedMatrix>& matrices,
                         const std::function<MatrixPlace(size_t parameter)>& place_of) {
  const bool is_shared = pages.plan().ownership() == Ownership::kWholePage;
  const int64_t others = pages.shards().size() - 1;
  MatrixBytes bytes;
  for (const OwnedMatrix& matrix : matrices) {
    const MatrixPlace place = place_of(matrix.parameter);
    const auto wire = static_cast<int64_t>(c10::elementSize(place.wire_dtype));
    const PlacedParameter& placed = pages.parameters()[matrix.parameter];
    const int64_t numel = placed.range.numel();
    const int64_t here = intersection(pages.owned(placed.page), placed.range).numel();
    const bool is_own = matrix.owner == pages.shards().rank();
    if (is_own && !(here == numel && place.is_on_device)) {
      bytes.whole += numel * static_cast<int64_t>(sizeof(float));
    }
    if (is_shared) {
      bytes.from_owners += (is_own ? others * numel : numel) * wire;
    } else {
      const int64_t travels = (is_own ? numel - here : here) * wire;
      bytes.to_owners += travels;
      bytes.from_owners += travels;
    }
  }
  return bytes;
}

}  // namespace zeropage::zero
