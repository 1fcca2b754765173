// A storage without memory that tells whoever reads or writes it why.
//
// Its size stays, so tensors over it can be viewed, split and asked for their sizes. An operator that asks such a tensor for
// its data throws, on every device and past the dispatcher too: LibTorch checks each such look at a storage. That is
// cheap, since the check is one flag which other checks share.
//
// Threads: one at a time changes a storage, while nobody uses it.
#pragma once

#include <string>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

namespace zeropage::memory {

// Frees the storage's memory. From here on a look at its data throws c10::Error with `why`. May be called again, with
// other words.
void make_absent(c10::StorageImpl& storage, std::string why);
bool is_absent(const c10::StorageImpl& storage);
// The storage, which was absent, has that memory: as many bytes, on its device.
void make_present(c10::StorageImpl& storage, c10::DataPtr memory);

// That LibTorch throws as said. Before the first make_absent().
void check_absent_storages();

}  // namespace zeropage::memory
