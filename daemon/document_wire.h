// Documents as the wire shows them.
#pragma once

#include "common/wire.h"
#include "daemon/documents.h"

namespace polykv::daemon {

/// backing: the daemon's.
flatbuffers::Offset<wire::DocumentInfo> document_info(flatbuffers::FlatBufferBuilder& builder,
                                                      const Document& document,
                                                      const std::string& backing = "memfd");

using polykv::to_wire;
wire::DeviceMemory to_wire(const DeviceMemory& memory, uint64_t epoch);

}  // namespace polykv::daemon
