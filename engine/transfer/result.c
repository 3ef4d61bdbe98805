/* The bytes of a copy, and its result: what was copied, and what was left out. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/transfer/internal.h"

ckd_status transfer_count_bytes(transfer *t, ckd_error *err) {
    bytes encoded = {0};
    t->total = 0;
    for (size_t i = 0; i < t->file_count; i++) {
        t->files[i].counted = false;
    }
    for (size_t i = 0; i < t->count && !encoded.failed; i++) {
        transfer_item *item = &t->items[i];
        if (!transfer_moves(item)) {
            continue;
        }
        bytes_clear(&encoded);
        manifest_encode(&encoded, &t->from->id, &item->m);
        item->bytes = item->manifest_bytes = encoded.size;
        for (size_t k = 0; k < item->m.file_count; k++) {
            transfer_file *f = transfer_find_file(t, &item->m.files[k].id);
            uint64_t size = !f->to_move || f->counted ? 0 : f->file.size;
            f->counted = true;
            item->bytes += size;
            t->total += size;
        }
    }
    bool failed = encoded.failed;
    bytes_free(&encoded);
    return failed ? err_nomem(err, METADATA_MAX, "a manifest") : CKD_OK;
}

ckd_status transfer_result(ckd_copy_result **out, transfer *t, ckd_error *err) {
    ckd_status status = t->options->dry_run ? CKD_OK : transfer_count_bytes(t, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_copy_result *r = calloc(1, sizeof(*r));
    if (r) {
        r->items = calloc(t->count + 1, sizeof(*r->items));
    }
    if (!r || !r->items) {
        free(r);
        return err_nomem(err, t->count * sizeof(*r->items), "what was copied");
    }
    for (size_t i = 0; i < t->count; i++) {
        const transfer_item *item = &t->items[i];
        ckd_copied *c = &r->items[r->count++];
        *c = (ckd_copied){.checkpoint = item->m.checkpoint, .state = item->state, .left = item->left};
        c->bytes = item->bytes; /* includes files that were replaced */
        r->left += item->state == CKD_COPY_LEFT;
        if (transfer_moves(item)) {
            c->checkpoint.stored_bytes += item->manifest_bytes;
            r->checkpoints++;
            r->bytes += item->bytes;
        }
    }
    for (size_t i = 0; i < t->file_count; i++) {
        r->files += t->files[i].to_move && (t->options->dry_run || t->files[i].in_place);
    }
    r->files += t->mended_files;
    r->bytes += t->mended_bytes;
    r->tags = t->tags ? t->tags->count : 0;
    *out = r;
    return CKD_OK;
}

void ckd_copy_result_free(ckd_copy_result *result) {
    if (result) {
        free(result->items);
        free(result);
    }
}

ckd_status transfer_skipped(const transfer *t, ckd_error *err) {
    const ckd_error *first = NULL;
    size_t count = 0;
    for (size_t i = 0; i < t->count; i++) {
        bool left = t->items[i].state == CKD_COPY_LEFT;
        first = left && !first ? &t->items[i].left : first;
        count += left;
    }
    if (!count) {
        return CKD_OK;
    }
    ckd_error why = *first;
    if (count > 1) {
        snprintf(why.message, sizeof(why.message), "%zu checkpoints were not copied; the first: %.300s",
                 count, first->message);
    }
    return err_from(err, why.status, &why);
}
