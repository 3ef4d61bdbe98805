/*
 * Parity files from any bytes. The stripes of an accepted file are where the arithmetic says and within
 * bounds, and reading any of them stays within the buffer. In fuzz builds all checksums match.
 */
#include <stdlib.h>

#include "codec/parity/parity.h"
#include "tests/support/fuzz.h"
#include "tests/support/fuzz_file.h"

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void try_stripe(parity_file *f, uint64_t stripe) {
    const parity_group *g = &f->group;
    uint32_t size = parity_stripe_size(g, stripe), piece = parity_piece_size(g, stripe);
    uint8_t *data = malloc(size);
    require(piece >= 1 && piece <= g->piece);
    require(parity_stripe_offset(g, stripe + 1) - parity_stripe_offset(g, stripe) == size);
    if (data && parity_read(f, stripe, 1, data, NULL) == CKD_OK &&
        parity_stripe_valid(data, g, g->row, stripe)) {
        for (size_t i = 0; i < g->member_count; i++) {
            require(parity_member_size(g, i, stripe) <= piece);
            (void)parity_member_valid(data, g, i, stripe, data);
        }
        parity_stripe_finish(data, g, g->row, stripe);
        require(parity_stripe_valid(data, g, g->row, stripe));
    }
    free(data);
}

static void try_file(parity_file *f) {
    const parity_group *g = &f->group;
    uint64_t stripes = parity_stripes(g);
    require(g->member_count >= 1 && g->member_count <= ERASURE_DATA_MAX && g->rows <= ERASURE_PARITY_MAX);
    require(g->row < g->rows && stripes >= 1 && stripes <= UINT32_MAX);
    require(parity_file_size(g) > parity_stripe_offset(g, stripes));
    for (uint64_t s = 0; s < stripes && s < 4; s++) {
        try_stripe(f, s);
    }
    try_stripe(f, stripes - 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    parity_file *f;
    ckd_id store = {{0}};
    if (size >= 32) {
        memcpy(store.bytes, data + 16, 16);
    }
    if (parity_open(&f, &store, fuzz_file(data, size), NULL) == CKD_OK) {
        try_file(f);
        parity_close(f);
    }
    return 0;
}
