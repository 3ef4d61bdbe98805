/*
 * Parts of other ranks from any bytes, given to the coordinator's commit. It fails, or the checkpoint loads
 * as it was saved. All checksums match. The first byte selects whose part it is, and whether the bytes are a
 * whole part (whose ids are corrected) or changes: 2 bytes of place and 1 of value each.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/ckptdelta.h"
#include "tests/support/fuzz.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { ROWS = 4, STORE_AT = 16, STORE_ID_END = 32, CHECKPOINT_AT = 40, IDS_END = 56 };

static char *dir;
static ckd_store *store;
static uint64_t step;
static const float values[ROWS] = {1, 2, 3, 4};

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void end(void) {
    ckd_store_close(store);
    tempdir_remove(dir);
    scratch_end();
}

static void begin(void) {
    char path[512];
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    if (store) {
        return;
    }
    scratch_begin();
    dir = tempdir_create();
    snprintf(path, sizeof(path), "%s/store", dir);
    o.threads = 1;
    require(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, NULL) == CKD_OK);
    atexit(end);
}

static ckd_save *seal(ckd_part *part, uint32_t rank, const ckd_id *checkpoint) {
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_tensor t = CKD_TENSOR_INIT;
    uint64_t shape[1] = {ROWS};
    o.run = "r";
    o.step = step;
    o.base = 1;
    o.rank = rank;
    o.world = 2;
    o.checkpoint_id = *checkpoint;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = rank * ROWS / 2, .count = ROWS / 2};
    t.data = values + rank * ROWS / 2;
    require(ckd_save_begin(&save, store, &o, NULL) == CKD_OK);
    require(ckd_save_tensor(save, &t, NULL) == CKD_OK);
    require(ckd_save_seal(part, save, NULL) == CKD_OK);
    return save;
}

static void change(uint8_t *part, size_t size, const uint8_t *data, size_t left) {
    for (; left >= 3; data += 3, left -= 3) {
        part[(data[0] | (size_t)data[1] << 8) % size] = data[2];
    }
}

/* A committed checkpoint is in the store, and has what both ranks saved. */
static void check_committed(const ckd_checkpoint *info) {
    ckd_load *load;
    float back[ROWS];
    ckd_load_request r = CKD_LOAD_REQUEST_INIT;
    ckd_delete_options gone = CKD_DELETE_OPTIONS_INIT;
    r.name = "w";
    r.data = back;
    r.size = sizeof(back);
    require(ckd_load_begin(&load, store, &info->id, NULL) == CKD_OK);
    require(ckd_load_tensor(load, &r, NULL) == CKD_OK);
    require(memcmp(back, values, sizeof(back)) == 0);
    ckd_load_end(load);
    require(ckd_store_delete(store, &info->id, 1, &gone, NULL) == CKD_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ckd_id id;
    ckd_part parts[2], given[2];
    ckd_save *saves[2];
    ckd_checkpoint info;
    if (size < 4) {
        return 0;
    }
    begin();
    step++;
    require(ckd_id_new(&id, NULL) == CKD_OK);
    for (uint32_t rank = 0; rank < 2; rank++) {
        saves[rank] = seal(&parts[rank], rank, &id);
    }
    size_t whose = data[0] & 1;
    bool is_whole = data[0] & 2 && size > IDS_END;
    uint8_t *bytes = malloc(is_whole ? size - 1 : parts[whose].size);
    require(bytes != NULL);
    memcpy(given, parts, sizeof(given));
    given[whose].data = bytes;
    if (is_whole) {
        given[whose].size = size - 1;
        memcpy(bytes, data + 1, size - 1);
        memcpy(bytes + STORE_AT, (uint8_t *)parts[0].data + STORE_AT, STORE_ID_END - STORE_AT);
        memcpy(bytes + CHECKPOINT_AT, id.bytes, size - 1 >= IDS_END ? IDS_END - CHECKPOINT_AT : 0);
    } else {
        memcpy(bytes, parts[whose].data, parts[whose].size);
        change(bytes, parts[whose].size, data + 1, size - 1);
    }
    ckd_status status = ckd_save_publish(&info, saves[0], given, 2, NULL);
    free(bytes);
    ckd_part_free(&parts[0]);
    ckd_part_free(&parts[1]);
    if (status == CKD_OK) {
        ckd_save_end(saves[1]);
        check_committed(&info);
    } else {
        ckd_save_abort(saves[1]);
    }
    return 0;
}
