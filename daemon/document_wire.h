// Documents as the wire shows them.
#pragma once

#include "common/wire.h"
#include "daemon/documents.h"

namespace polykv::daemon {

flatbuffers::Offset<wire::DocumentInfo> document_info(flatbuffers::FlatBufferBuilder& builder,
                                                      const Document& document);

}  // namespace polykv::daemon
