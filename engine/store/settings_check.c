#include "engine/store/settings_check.h"

#include "engine/store/settings.h"

ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    ckd_status status = settings_read(&n, store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = settings_why(&n.items[i], store, &why);
        if (found != CKD_OK) {
            err_in_file(&why, found, path_setting(store->path, &n.items[i].name).text);
        }
        status = damage_record(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    settings_free(&n);
    return status;
}
