/*
 * Messages between ranks from any bytes: messages, descriptions, plans. In fuzz builds all checksums match.
 * An accepted plan must give the same bytes when it is written again. A plan made from descriptions must be
 * readable.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/ranks/internal.h"
#include "tests/support/fuzz.h"

enum { ASKED = 64 }; /* the most ranks, and regions of a rank, that a plan is asked about */

static void try_message(const uint8_t *data, size_t size) {
    ckd_bytes m = {(void *)data, size};
    ckd_error err = {0};
    rank_message got = rank_message_read(&m, &err);
    if (got.readable ? got.inside.size > size : got.status != CKD_E_CORRUPT || !err.message[0]) {
        abort();
    }
}

static void query(const ckd_plan *plan) {
    ckd_plan_summary s = ckd_plan_summarise(plan);
    for (uint32_t r = 0; r <= s.world && r < ASKED; r++) {
        for (size_t i = 0; i < ASKED; i++) {
            if (ckd_plan_writes(plan, r, i) && r == s.world) {
                abort();
            }
        }
    }
}

static void try_plan(const uint8_t *data, size_t size) {
    ckd_plan *plan;
    ckd_bytes again;
    if (plan_read(&plan, data, size, NULL) != CKD_OK) {
        return;
    }
    query(plan);
    if (plan_bytes(&again, plan, NULL) == CKD_OK &&
        (again.size != size || memcmp((uint8_t *)again.data + 16, data + 16, size - 24) != 0)) {
        abort();
    }
    ckd_bytes_free(&again);
    ckd_plan_free(plan);
}

/* The description of one rank; or those of two, after "pair" and the size of the first. */
static void try_descriptions(const uint8_t *data, size_t size) {
    ckd_plan *plan, *read;
    ckd_bytes text;
    uint32_t world = memcmp(data, "pair", 4) == 0 ? 2 : 1;
    data += world == 2 ? 8 : 0;
    size -= world == 2 ? 8 : 0;
    size_t half = world == 2 ? load_le32(data - 4) : size;
    if (half > size) {
        return;
    }
    ckd_bytes both[2] = {{(void *)data, half}, {(void *)(data + half), size - half}};
    if (ckd_plan_make(&plan, both, world, NULL) != CKD_OK) {
        return;
    }
    query(plan);
    if (plan_bytes(&text, plan, NULL) == CKD_OK) {
        if (plan_read(&read, text.data, text.size, NULL) == CKD_E_CORRUPT) {
            abort();
        }
        ckd_plan_free(read);
    }
    ckd_bytes_free(&text);
    ckd_plan_free(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    try_message(data, size);
    try_plan(data, size);
    if (size >= 16) {
        try_descriptions(data, size);
    }
    return 0;
}
