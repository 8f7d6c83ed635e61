#include "daemon/handles.h"

namespace polykv::daemon {

const char* handle_kind_name(HandleKind kind) {
  switch (kind) {
    case HandleKind::lease:
      return "lease";
    case HandleKind::ticket:
      return "ticket";
    case HandleKind::segment:
      return "segment";
  }
  return "handle";
}

}  // namespace polykv::daemon
