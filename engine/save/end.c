/* How a save ends: its files are removed or stay, and everything is released. */
#include <stdlib.h>
#include <unistd.h>

#include "engine/save/device.h"
#include "engine/store/materialized.h"

/* false if some of them may be left. */
static bool remove_files(const ckd_save *save, save_end end) {
    const char *root = save->store->path;
    ckd_status status = file_remove(path_chunk(root, &save->file_id, ".tmp").text, true, NULL);
    if (status == CKD_OK && end == SAVE_DROPPED) {
        status = file_remove(path_chunk(root, &save->file_id, "").text, true, NULL);
        if (status == CKD_OK) {
            /* durable before the intent is removed */
            status = dir_sync(path_in(root, DIR_CHUNKS).text, NULL);
        }
    }
    return status == CKD_OK;
}

void save_free(ckd_save *save, save_end end) {
    if (!save) {
        return;
    }
    const char *root = save->store->path;
    save_stop_helpers(save);
    chunk_writer_abort(save->writer);
    chunk_writer_abort(save->materialized);
    if (save->materialized_closed && save->process == getpid()) {
        pathname p =
            path_materialized(save->store->path, &save->checkpoint, save->options.rank, &save->writer_id);
        file_remove(p.text, true, NULL);
    }
    if (save->intent_lock && save->process == getpid() && remove_files(save, end) && end != SAVE_UNDECIDED) {
        file_remove(path_intent(root, &save->writer_id).text, true, NULL);
    }
    lock_release(save->intent_lock);
    lock_release(save->reader_lock);
    bytes_free(&save->terms);
    save_names_free(&save->names);
    bytes_free(&save->whole_masters);
    free(save->dependencies);
    free(save->ranks);
    save_compare_free(save);
    save_device_free(save);
    measures_free(&save->measures);
    step_states_free(&save->steps);
    save_workspace_return(save, end == SAVE_COMMITTED && save->process == getpid());
    content_index_free(&save->dedup_index);
    arena_free(&save->arena);
    views_free(&save->views);
    free(save);
}
