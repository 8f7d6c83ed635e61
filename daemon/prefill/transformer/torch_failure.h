// What a failure of libtorch's on a GPU means for a worker, by its text: most of them have no type of their own.
#pragma once

#include <string_view>

#include "polykv/status.h"

namespace polykv {

/// POLYKV_ERR_NO_MEMORY: the device's memory is used up, and a smaller or later document may do. POLYKV_ERR_DEVICE_LOST: the
/// driver failed, perhaps in an earlier call, after which a process cannot use the device any more. Else
/// POLYKV_ERR_INTERNAL.
polykv_status torch_failure_code(std::string_view text);

}  // namespace polykv
