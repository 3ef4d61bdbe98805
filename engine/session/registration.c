/* Registration of tensors and bytes. */
#include <stdlib.h>

#include "base/hash.h"
#include "engine/device/device.h"
#include "engine/common/common.h"
#include "engine/session/session.h"

/* ---- names: a hash table of item numbers (from 1), with open addressing; at most half full ---- */

static size_t name_place(const ckd_session *s, const char *name) {
    return (size_t)(hash64(name, strlen(name)) % s->name_capacity);
}

static void enter_name(ckd_session *s, size_t number) {
    size_t i = name_place(s, s->items[number - 1].tensor.name);
    while (s->names[i]) {
        i = (i + 1) % s->name_capacity;
    }
    s->names[i] = number;
}

static ckd_status reserve_names(ckd_session *s, size_t capacity, ckd_error *err) {
    size_t *names = calloc(capacity, sizeof(*names));
    if (!names) {
        return err_nomem(err, capacity * sizeof(*names), "names of registered tensors");
    }
    free(s->names);
    s->names = names;
    s->name_capacity = capacity;
    for (size_t number = 1; number <= s->item_count; number++) {
        enter_name(s, number);
    }
    return CKD_OK;
}

/* ---- items ---- */

static ckd_status reserve_item(ckd_session *s, ckd_error *err) {
    if (s->sources) {
        return err_set(err, CKD_E_STATE, "tensors are registered before the first step");
    }
    if (s->item_count < s->item_capacity) {
        return CKD_OK;
    }
    size_t capacity = s->item_capacity ? 2 * s->item_capacity : 64;
    session_item *grown = realloc(s->items, capacity * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, capacity * sizeof(*grown), "registered tensors");
    }
    s->items = grown;
    for (size_t i = 0; i < s->item_count; i++) {
        s->items[i].tensor.shape = s->items[i].shape; /* the items have moved */
    }
    ckd_status status = reserve_names(s, 4 * capacity, err);
    s->item_capacity = status == CKD_OK ? capacity : s->item_capacity;
    return status;
}

static bool conflict(const session_item *a, const session_item *b) {
    if (a->is_bytes || b->is_bytes) {
        return a->is_bytes == b->is_bytes;
    }
    geometry g;
    const ckd_tensor *t = &a->tensor, *u = &b->tensor;
    if (t->dtype != u->dtype || t->ndim != u->ndim ||
        memcmp(a->shape, b->shape, t->ndim * sizeof(a->shape[0])) != 0) {
        return true;
    }
    if (!geometry_init(&g, t->ndim, a->shape)) {
        return false;
    }
    ckd_region first = region_canonical(&g, &t->region), second = region_canonical(&g, &u->region);
    return region_equal(&first, &second, t->ndim) ||
           (a->bytes > 0 && b->bytes > 0 && regions_overlap(&g, &first, &second));
}

/* Refuses items that would make every save fail. */
static ckd_status check_new(const session_item *item, const ckd_session *s, ckd_error *err) {
    const char *name = item->tensor.name;
    for (size_t i = name_place(s, name); s->names[i]; i = (i + 1) % s->name_capacity) {
        const session_item *other = &s->items[s->names[i] - 1];
        if (strcmp(other->tensor.name, name) == 0 && conflict(item, other)) {
            return err_in_tensor(
                err,
                err_set(err, CKD_E_INVALID, "'%s' is registered already%s: give each its own name", name,
                        item->is_bytes ? "" : ", with another shape or dtype, or a region that overlaps"),
                name);
        }
    }
    return CKD_OK;
}

static ckd_status add_item(ckd_session *s, session_item item, const char *name, ckd_error *err) {
    ckd_status status = session_check(s, err);
    THEN(status, reserve_item(s, err));
    if (status != CKD_OK) {
        return status;
    }
    if (!item.data && item.bytes > 0) {
        err_set(err, CKD_E_INVALID, "no memory was given to save from and restore to");
        return err_in_tensor(err, CKD_E_INVALID, name);
    }
    item.tensor.name = name;
    status = check_new(&item, s, err);
    if (status != CKD_OK) {
        return status;
    }
    item.tensor.name = strdup(name);
    if (!item.tensor.name) {
        return err_nomem(err, strlen(name), "a name");
    }
    if (item.tensor.weight) {
        item.weight = strdup(item.tensor.weight);
        if (!item.weight) {
            free((void *)(uintptr_t)item.tensor.name);
            return err_nomem(err, strlen(item.tensor.weight), "a weight's name");
        }
        item.tensor.weight = item.weight;
    }
    session_item *place = &s->items[s->item_count++];
    *place = item;
    place->tensor.shape = place->shape;
    enter_name(s, s->item_count);
    return CKD_OK;
}

/*
 * Copies the description, which the caller owns only during the call. A missing backend, or an address of another
 * device, is thus reported now rather than at the first save.
 */
static ckd_status take_device(session_item *item, ckd_error *err) {
    const ckd_device *from = item->tensor.device;
    item->device = (ckd_device)CKD_DEVICE_INIT;
    ckd_status status = struct_copy(&item->device, sizeof(item->device), from, SIZE_UP_TO(ckd_device, stream),
                                    "ckd_device", err);
    if (status != CKD_OK) {
        return status;
    }
    item->on_device = true;
    item->tensor.device = NULL;
    const device_backend *backend = device_backend_open(err);
    return !backend     ? CKD_E_DEVICE
           : item->data ? device_check_address(backend, item->device.device, item->data, err)
                        : CKD_OK;
}

ckd_status ckd_session_add(ckd_session *s, const ckd_tensor *tensor, void *data, uint32_t in_group,
                           ckd_error *err) {
    session_item item = {.data = data, .group = in_group};
    uint64_t elements;
    ckd_status status = session_check(s, err);
    THEN(status, tensor_copy(&item.tensor, tensor, err));
    if (status != CKD_OK) {
        return status;
    }
    item.tensor.data = NULL;
    item.tensor.read = NULL;
    status = tensor_check(&elements, &item.tensor, err);
    if (status == CKD_OK && item.tensor.device) {
        status = take_device(&item, err);
    }
    if (status == CKD_OK && in_group >= SNAPSHOT_AT_ONCE) {
        status =
            err_set(err, CKD_E_INVALID, "the number of a group must be below %u", (unsigned)SNAPSHOT_AT_ONCE);
    }
    if (status != CKD_OK) {
        return item.tensor.name ? err_in_tensor(err, status, item.tensor.name) : status;
    }
    if (item.tensor.ndim > 0) {
        memcpy(item.shape, item.tensor.shape, item.tensor.ndim * sizeof(item.shape[0]));
    }
    item.bytes = elements * ckd_dtype_size(item.tensor.dtype);
    return add_item(s, item, item.tensor.name, err);
}

ckd_status ckd_session_add_bytes(ckd_session *s, const char *name, void *data, size_t size, ckd_error *err) {
    size_t length = name ? strnlen(name, CKD_NAME_MAX + 1) : 0;
    if (length < 1 || length > CKD_NAME_MAX || !utf8_valid(name, length) || size > CKD_BLOB_MAX) {
        return err_set(err, CKD_E_INVALID,
                       "registered bytes need a name of 1 to %d bytes of UTF-8, and are at most 1 GiB",
                       CKD_NAME_MAX);
    }
    return add_item(s,
                    (session_item){.data = data, .bytes = size, .group = SNAPSHOT_AT_ONCE, .is_bytes = true},
                    name, err);
}

/* ---- roles of the registered tensors, from all their names together ---- */

static void report_doubts(ckd_session *s, size_t count, const char *first) {
    pthread_mutex_lock(&s->saver.store_turn);
    store_message(
        s->saver.store,
        "%zu registered tensors look like optimizer state but belong to no weight of the same shape, the "
        "first is '%s': they are stored exactly unless you give them a role",
        count, first);
    pthread_mutex_unlock(&s->saver.store_turn);
}

/* Ranks hold different tensors but must agree on roles. With ranks, the role therefore depends on each name alone. */
ckd_status session_find_roles(ckd_session *s, bool lossy, ckd_error *err) {
    if (s->saver.ranks) {
        return CKD_OK;
    }
    ckd_tensor_name *tensors = calloc(s->item_count + 1, sizeof(*tensors));
    ckd_tensor_role *found = calloc(s->item_count + 1, sizeof(*found));
    size_t count = 0, doubts = 0;
    const char *first = NULL;
    for (size_t i = 0; i < s->item_count && tensors && found; i++) {
        if (!s->items[i].is_bytes) {
            const ckd_tensor *t = &s->items[i].tensor;
            tensors[count++] = (ckd_tensor_name){t->name, t->role, t->dtype, t->ndim, t->shape};
        }
    }
    ckd_status status = tensors && found
                            ? ckd_roles_find(found, tensors, count, NULL, 0, err)
                            : err_nomem(err, s->item_count * sizeof(*tensors), "roles of tensors");
    for (size_t i = 0, k = 0; i < s->item_count && status == CKD_OK; i++) {
        ckd_tensor *t = &s->items[i].tensor;
        if (!s->items[i].is_bytes) {
            t->role = found[k].role;
            t->weight = t->weight ? t->weight : found[k].weight;
            first = found[k].in_doubt && !first ? t->name : first;
            doubts += found[k++].in_doubt ? 1 : 0;
        }
    }
    free(tensors);
    free(found);
    if (status == CKD_OK && doubts && lossy) {
        report_doubts(s, doubts, first);
    }
    return status;
}
