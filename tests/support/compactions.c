#include "tests/support/compactions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scenes.h"

ckd_compaction *compact_with(ckd_store *store, const ckd_compact_options *o) {
    ckd_compaction *done;
    ckd_error err = {0};
    if (ckd_compact(&done, store, o, &err) != CKD_OK) {
        fail_msg("compact: %s (%s)", err.message, err.file);
    }
    return done;
}

ckd_compact_options options_for(uint32_t max_depth) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = max_depth;
    o.pack_below = CKD_NO_PACKS;
    return o;
}

void check_items(const ckd_compaction *done) {
    for (size_t i = 0; i < done->count; i++) {
        if (done->items[i].left.status != CKD_OK) {
            fail_msg("step %llu was left: %s", (unsigned long long)done->items[i].checkpoint.step,
                     done->items[i].left.message);
        }
    }
    assert_int_equal(done->left, 0);
}

void make_chain(ckd_store *store, const char *run, ckd_fidelity fidelity, uint64_t first, uint64_t count) {
    drift d = drift_new(96, 64, 7);
    for (uint64_t step = 0; step < first + count; step++, drift_step(&d)) {
        if (step < first) {
            continue;
        }
        ckd_save_options o = lossy_options(run, step, fidelity);
        o.max_load_cost = o.newest_load_cost = 1000;
        save_drift(store, &o, &d);
    }
    drift_free(&d);
}

uint64_t bytes_of_all(ckd_store *store) {
    ckd_checkpoint_list *list;
    uint64_t sum = 0;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        sum += list->items[i].stored_bytes;
    }
    ckd_checkpoint_list_free(list);
    return sum;
}
