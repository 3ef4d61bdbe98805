#include "engine/store/notes_damage.h"

#include "engine/store/notes.h"

ckd_status notes_damage(damage_list *damage, const ckd_store *store, ckd_error *err) {
    notes n = {0};
    ckd_status status = notes_read(&n, store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = notes_why(&n.items[i], store, &why);
        if (found != CKD_OK) {
            err_in_file(&why, found, path_note(store->path, &n.items[i].name).text);
        }
        status = damage_note(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    notes_free(&n);
    return status;
}
