/* Validates an entry before the first row is written. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/db.h"

bool text_storable(const char *text, size_t min, size_t max) {
    size_t size = text ? strnlen(text, max + 1) : 0;
    return text && size >= min && size <= max && utf8_valid(text, size);
}

bool number_storable(uint64_t value) {
    return value <= INT64_MAX;
}

static ckd_status checkpoint_validate(const ckd_checkpoint *p, ckd_error *err) {
    static const ckd_id zero;
    bool parent = memcmp(&p->parent, &zero, sizeof(zero)) != 0;
    if (!run_name_valid(p->run)) {
        return err_set(err, CKD_E_INVALID, "\"%.*s\" is not a valid name for a run", CKD_RUN_MAX, p->run);
    }
    if (!number_storable(p->step)) {
        return err_set(err, CKD_E_INVALID, "step %llu of run %s is too large: steps end at 2^63 - 1",
                       (unsigned long long)p->step, p->run);
    }
    const char *problem = NULL;
    if (memcmp(&p->id, &zero, sizeof(zero)) == 0) {
        problem = "no id";
    } else if (p->kind < CKD_BASE || p->kind > CKD_LOSSY_BASE) {
        problem = "an unknown kind";
    } else if (p->fidelity < CKD_EXACT || p->fidelity > CKD_COARSE) {
        problem = "an unknown fidelity";
    } else if ((p->kind == CKD_BASE && parent) || (p->kind == CKD_DELTA && !parent)) {
        problem = parent ? "a parent, although it is a base" : "no parent, although it is a delta";
    } else if (!text_storable(p->metric_name, 0, sizeof(p->metric_name) - 1)) {
        problem = "a metric whose name is not UTF-8 or too long";
    } else if (!number_storable(p->tensors) || !number_storable(p->raw_bytes) ||
               !number_storable(p->stored_bytes) || !number_storable(p->created_ns)) {
        problem = "a size beyond 2^63";
    }
    return problem ? err_set(err, CKD_E_INVALID, "checkpoint %s@%llu has %s", p->run,
                             (unsigned long long)p->step, problem)
                   : CKD_OK;
}

static ckd_status file_validate(const catalog_file *f, ckd_error *err) {
    if (!text_storable(f->name, 1, sizeof(f->name) - 1) || strchr(f->name, '/') || f->name[0] == '.') {
        return err_set(err, CKD_E_INVALID, "\"%.*s\" is not a valid name for a chunk file",
                       (int)sizeof(f->name) - 1, f->name);
    }
    if (!number_storable(f->size)) {
        return err_set(err, CKD_E_INVALID, "chunk file %s has a size beyond 2^63", f->name);
    }
    return CKD_OK;
}

ckd_status entry_validate(const catalog_entry *entry, ckd_error *err) {
    ckd_status status = checkpoint_validate(entry->checkpoint, err);
    if (status == CKD_OK && !number_storable(entry->manifest_bytes)) {
        status = err_set(err, CKD_E_INVALID, "a manifest has a size beyond 2^63");
    }
    for (size_t i = 0; status == CKD_OK && i < entry->file_count; i++) {
        status = file_validate(&entry->files[i], err);
    }
    return status;
}
