// What ops_impl.inl needs, included outside its namespaces.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#include "include/internal/geometry.h"
#include "kernels/block_layout.h"
#include "kernels/codebooks.h"
#include "kernels/codec_rules.h"
#include "kernels/cpu/ops.h"
#include "kernels/half.h"
