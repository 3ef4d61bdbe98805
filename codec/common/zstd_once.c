/*
 * Packs and unpacks whole zstd frames. Contexts are swapped atomically, without a lock that a fork could leave locked.
 */
#include "codec/common/common.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <zstd.h>
#include <zstd_errors.h>

#define KEPT_MAX ((size_t)4 << 20) /* bytes of a cached context */

static _Atomic(ZSTD_CCtx *) packer;
static _Atomic(ZSTD_DCtx *) unpacker;

/* Runs when the library is unloaded or the process ends. */
__attribute__((destructor)) static void end(void) {
    ZSTD_freeCCtx(atomic_exchange(&packer, NULL));
    ZSTD_freeDCtx(atomic_exchange(&unpacker, NULL));
}

size_t zstd_once_bound(size_t size) {
    return ZSTD_compressBound(size);
}

size_t zstd_once_pack(void *to, size_t capacity, const void *from, size_t size, int level) {
    ZSTD_CCtx *c = atomic_exchange(&packer, NULL);
    c = c ? c : ZSTD_createCCtx();
    size_t packed = c ? ZSTD_compressCCtx(c, to, capacity, from, size, level) : 0;
    bool good = c && !ZSTD_isError(packed);
    if (good && ZSTD_sizeof_CCtx(c) <= KEPT_MAX) {
        c = atomic_exchange(&packer, c);
    }
    ZSTD_freeCCtx(c);
    return good ? packed : 0;
}

ckd_status zstd_once_unpack(void *to, size_t size, const void *from, size_t packed) {
    if (ZSTD_getFrameContentSize(from, packed) != size ||
        ZSTD_findFrameCompressedSize(from, packed) != packed) {
        return CKD_E_CORRUPT;
    }
    ZSTD_DCtx *c = atomic_exchange(&unpacker, NULL);
    c = c ? c : ZSTD_createDCtx();
    if (!c) {
        return CKD_E_NOMEM;
    }
    size_t n = ZSTD_decompressDCtx(c, to, size, from, packed);
    ZSTD_freeDCtx(atomic_exchange(&unpacker, c));
    bool memory = ZSTD_isError(n) && ZSTD_getErrorCode(n) == ZSTD_error_memory_allocation;
    return n == size ? CKD_OK : memory ? CKD_E_NOMEM : CKD_E_CORRUPT;
}
