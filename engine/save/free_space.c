/*
 * Makes space for a save on a disk that is nearly full. A failed write into the chunk file cannot be repeated, as the
 * values of earlier tensors are gone. So materialized copies are removed before the disk is full. Small files that
 * did not fit are written again, as new files. If the file system does not foretell its limit (quotas, some network
 * file systems), the save fails; but the copies are gone then, and the next save has their space.
 */
#include "engine/store/materialized.h"
#include "engine/save/save.h"

/* Besides the blocks: 1 MiB of each file that is buffered and not on the disk yet; manifest, intents, catalog. */
#define SLACK (UINT64_C(4) << 20)

static void drop_own(ckd_save *save) {
    chunk_writer_abort(save->materialized);
    save->materialized = NULL;
    save->materialized_failed = true;
}

bool save_drop_copies(ckd_save *save) {
    bool dropped = save->materialized != NULL;
    drop_own(save);
    views_drop_materialized(&save->views);
    dropped = materialized_drop_all(save->store) || dropped; /* includes this save's, if they are complete */
    save->materialized_closed = false;
    if (dropped) {
        store_message(save->store,
                      "the disk is nearly full: the copies that keep the newest checkpoints cheap to load "
                      "were removed");
    }
    return dropped;
}

bool save_may_retry(ckd_save *save, ckd_status status) {
    return status == CKD_E_NOSPACE && save_drop_copies(save);
}

bool save_has_space(const ckd_save *save, uint64_t payload, uint64_t copies) {
    uint64_t room = dir_free_space(path_in(save->store->path, DIR_CHUNKS).text);
    uint64_t needed = payload + save->index_bytes + SLACK;
    return room >= needed && room - needed >= copies;
}

void save_free_space(ckd_save *save, uint64_t payload, uint64_t copies) {
    uint64_t room = dir_free_space(path_in(save->store->path, DIR_CHUNKS).text);
    uint64_t needed = payload + save->index_bytes + SLACK;
    if (room < needed) {
        save_drop_copies(save);
    } else if (room - needed < copies) {
        drop_own(save);
    }
}
