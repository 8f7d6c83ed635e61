// Which of an encoder's 13 scales suits a row of 3 to 6 bits: the one whose codes have the least
// squared error. Included behind ops_impl.inl, in the same way.
//
// All scales at once, a value at a time: a lane is a scale. Magnitudes are cut into cells so narrow
// that with each scale only two levels of a cell can be nearest, and a table has those two for each
// lane, times the scale. A value's error is then the smaller one of two distances.

constexpr uint32_t kLanes8 = 8;

// By reference, as vectors by value are not the same on all instruction sets.
POLYKV_TARGET inline void load8(const float* values, Float8& x) {
  std::memcpy(&x, values, sizeof x);
}

constexpr uint32_t kScaleLanes = 16;
static_assert(kScaleCandidates <= kScaleLanes);

/// [scale]; lanes without a scale are zero.
struct ScaleCell {
  alignas(64) float lower[kScaleLanes];
  alignas(64) float upper[kScaleLanes];  // the next level, or the same one where it is the last
};

template <uint32_t Bits>
struct ScaleCells {
  static constexpr const Codebook& kBook = codebook(Bits);
  static constexpr uint32_t kHalf = kBook.size / 2;

  /// Between levels i - 1 and i of the upper half.
  static constexpr double boundary(uint32_t i) {
    return (kBook.levels[kHalf + i - 1] + kBook.levels[kHalf + i]) / 2.0;
  }
  /// With no scale are two boundaries in one cell.
  static constexpr double kWidth = [] {
    double least = boundary(1);
    for (uint32_t i = 2; i < kHalf; ++i) least = std::min(least, boundary(i) - boundary(i - 1));
    return least * kBook.scale(0) * 0.999;
  }();
  /// The last one begins behind all boundaries.
  static constexpr auto kCount = static_cast<uint32_t>(
      boundary(kHalf - 1) * kBook.scale(kScaleCandidates - 1) / kWidth + 2);

  /// The lower one of the two levels, counted from the middle, to one of which a value of a cell is
  /// nearest.
  static constexpr uint32_t lower_level(uint32_t cell, uint32_t scale) {
    uint32_t level = 0;
    while (level + 1 < kHalf && boundary(level + 1) * kBook.scale(scale) <= cell * kWidth) ++level;
    return level;
  }

  static constexpr std::array<ScaleCell, kCount> kCells = [] {
    std::array<ScaleCell, kCount> cells{};
    for (uint32_t cell = 0; cell < kCount; ++cell) {
      for (uint32_t lane = 0; lane < kScaleCandidates; ++lane) {
        const double scale = kBook.scale(lane);
        const uint32_t level = lower_level(cell, lane);
        const uint32_t next = std::min(level + 1, kHalf - 1);
        cells[cell].lower[lane] = static_cast<float>(scale * kBook.levels[kHalf + level]);
        cells[cell].upper[lane] = static_cast<float>(scale * kBook.levels[kHalf + next]);
      }
    }
    return cells;
  }();
};

/// Magnitudes of a row and the numbers of their cells.
struct CelledRow {
  alignas(64) float magnitudes[kMaxHeadDim];
  alignas(64) uint32_t cells[kMaxHeadDim];
};

POLYKV_TARGET inline void find_cells(const float* row, uint32_t dims, float cells_per_unit,
                                     uint32_t cell_count, CelledRow& out) {
  const auto last = static_cast<int32_t>(cell_count - 1);
  for (uint32_t i = 0; i < dims; ++i) {
    out.magnitudes[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(row[i]) & 0x7fffffffU);
    const auto cell = static_cast<int32_t>(out.magnitudes[i] * cells_per_unit);
    out.cells[i] = static_cast<uint32_t>(cell < last ? cell : last);
  }
}

/// errors[scale]: sums of squares. dims: a multiple of 2.
POLYKV_TARGET inline void sum_errors(const CelledRow& row, uint32_t dims, const ScaleCell* cells,
                                     float* errors) {
#if POLYKV_AVX2
  __m256 sums[4] = {};  // of even and of odd values, which do not wait for each other
  for (uint32_t dim = 0; dim < dims; dim += 2) {
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; ++i) {
      const ScaleCell& cell = cells[row.cells[dim + i]];
      const __m256 value = _mm256_broadcast_ss(&row.magnitudes[dim + i]);
#pragma GCC unroll 2
      for (uint32_t half = 0; half < 2; ++half) {
        const __m256 above = _mm256_sub_ps(value, _mm256_load_ps(cell.lower + half * kLanes8));
        const __m256 below = _mm256_sub_ps(_mm256_load_ps(cell.upper + half * kLanes8), value);
        const __m256 distance = _mm256_min_ps(above, below);
        sums[i * 2 + half] = _mm256_fmadd_ps(distance, distance, sums[i * 2 + half]);
      }
    }
  }
  _mm256_store_ps(errors, _mm256_add_ps(sums[0], sums[2]));
  _mm256_store_ps(errors + kLanes8, _mm256_add_ps(sums[1], sums[3]));
#else
  float sums[kScaleLanes] = {};
  for (uint32_t dim = 0; dim < dims; ++dim) {
    const ScaleCell& cell = cells[row.cells[dim]];
    const float value = row.magnitudes[dim];
    for (uint32_t lane = 0; lane < kScaleLanes; ++lane) {
      const float above = value - cell.lower[lane];
      const float below = cell.upper[lane] - value;
      const float distance = above < below ? above : below;
      sums[lane] += distance * distance;
    }
  }
  std::memcpy(errors, sums, sizeof sums);
#endif
}

template <uint32_t Bits>
POLYKV_TARGET inline float best_scale(const float* row, uint32_t dims) {
  using Cells = ScaleCells<Bits>;
  CelledRow celled;
  find_cells(row, dims, static_cast<float>(1 / Cells::kWidth), Cells::kCount, celled);
  alignas(64) float errors[kScaleLanes];
  sum_errors(celled, dims, Cells::kCells.data(), errors);
  uint32_t best = 0;
  for (uint32_t i = 1; i < kScaleCandidates; ++i) best = errors[i] < errors[best] ? i : best;
  return static_cast<float>(Cells::kBook.scale(best));
}

POLYKV_TARGET inline float best_scale(const float* row, uint32_t dims, const Codebook& book) {
  switch (book.bits) {
    case 3:
      return best_scale<3>(row, dims);
    case 4:
      return best_scale<4>(row, dims);
    case 5:
      return best_scale<5>(row, dims);
    default:
      return best_scale<6>(row, dims);
  }
}
