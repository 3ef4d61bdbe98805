#include "engine/integrity/throttled_check.h"

#include "engine/store/store.h"

/* Called after each record. The file is open by now, and may be unlinked. */
static ckd_status throttle(void *context, uint64_t stored_bytes, ckd_error *err) {
    throttled_check *c = context;
    lock_release(c->reader);
    c->reader = NULL;
    return rate_limiter_add(c->limiter, stored_bytes, err);
}

static ckd_status check(throttled_check *c, const live_file *f, ckd_error *err) {
    char checkpoint[CHECKPOINT_TEXT];
    file_check check = {.store = c->store,
                        .damage = c->damage,
                        .dependency_infos = c->files->dependency_infos,
                        .dependency_info_count = c->files->dependency_info_count,
                        .payload = &c->payload,
                        .throttle = throttle,
                        .throttle_context = c};
    live_file_checkpoint(checkpoint, f);
    return check_named_file(&check, &f->file, checkpoint, err);
}

ckd_status throttled_check_file(bool *right, bool *listed, throttled_check *c, const live_file *f,
                                ckd_error *err) {
    ckd_verify_result *found = c->damage->result;
    size_t before = found->damage_count;
    pathname path = path_manifest(c->store->path, f->name.run, f->name.step, f->name.generation);
    ckd_status status = store_lock_reader(&c->reader, c->store, err);
    if (status != CKD_OK) {
        return status;
    }
    /*
     * A file that was collected meanwhile is no damage. Its manifest may also have gone alone, as another one names the
     * file now.
     */
    bool needed = file_exists(path.text) || file_exists(path_chunk(c->store->path, &f->file.id, "").text);
    status = needed ? check(c, f, err) : CKD_OK;
    lock_release(c->reader);
    c->reader = NULL;
    found->files += needed;
    found->bytes += needed ? f->file.size : 0;
    if (right) {
        *right = needed && found->damage_count == before;
    }
    if (listed) {
        *listed = needed;
    }
    return status;
}
