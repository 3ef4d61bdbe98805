/*
 * Registered tensors in device memory. The devices make their snapshot, in the order of the trainer's streams
 * (device_snapshot.h). The trainer's thread does not wait; a fence only delays later work on the streams.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/session/session.h"

ckd_status session_device_sources(ckd_session *s, ckd_error *err) {
    size_t count = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        count += s->items[i].on_device;
    }
    s->device_sources = calloc(count + 1, sizeof(*s->device_sources));
    if (!s->device_sources) {
        return err_nomem(err, count * sizeof(*s->device_sources), "the registered tensors");
    }
    for (size_t i = 0; i < s->item_count; i++) {
        session_item *item = &s->items[i];
        if (item->on_device) {
            item->on_devices = s->device_count++;
            s->device_sources[item->on_devices] = (device_source){.data = item->data,
                                                                  .bytes = item->bytes,
                                                                  .group = item->group,
                                                                  .device = item->device.device,
                                                                  .stream = item->device.stream};
        }
    }
    return CKD_OK;
}

device_snapshot_bytes session_device_size(const ckd_session *s, uint32_t waiting) {
    uint64_t per_snapshot =
        device_snapshot_bytes_of(s->device_sources, s->device_count, UINT64_MAX).on_one_device;
    uint64_t budget = s->options.device_bytes ? s->options.device_bytes : per_snapshot,
             used = waiting * per_snapshot;
    return device_snapshot_bytes_of(s->device_sources, s->device_count, budget > used ? budget - used : 0);
}

ckd_status session_device_slot(ckd_session *s, session_slot *slot, ckd_error *err) {
    ckd_status status = device_snapshot_new(&slot->devices, s->device_sources, s->device_count,
                                            session_device_size(s, s->shared.slot_count).on_one_device, err);
    if (status != CKD_OK) {
        return status;
    }
    device_snapshot_size size = device_snapshot_sizes(slot->devices);
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.device_bytes += size.on_devices;
    s->shared.state.snapshot_bytes += size.on_host;
    pthread_mutex_unlock(&s->shared.mutex);
    if (size.refused) {
        pthread_mutex_lock(&s->saver.store_turn);
        store_message(
            s->saver.store,
            "a snapshot needs %llu bytes of device memory, but less is free: it goes to host memory, and "
            "training waits for the copy",
            (unsigned long long)size.refused);
        pthread_mutex_unlock(&s->saver.store_turn);
    }
    return CKD_OK;
}

void session_device_stage(ckd_session *s, session_slot *slot) {
    slot->device_status = CKD_OK; /* no other thread uses the slot yet */
    if (slot->devices) {
        slot->device_status = device_snapshot_start(slot->devices, &slot->device_error);
        if (s->options.snapshot != CKD_SNAPSHOT_LAZY) {
            session_device_fence(s, slot, SNAPSHOT_ALL);
        }
    }
}

void session_device_fence(ckd_session *s, session_slot *slot, uint32_t fence_group) {
    ckd_error why;
    ckd_status status = slot->devices ? device_snapshot_fence(slot->devices, fence_group, &why) : CKD_OK;
    if (status != CKD_OK) {
        pthread_mutex_lock(&s->shared.mutex);
        slot->device_status =
            slot->device_status == CKD_OK ? err_from(&slot->device_error, status, &why) : slot->device_status;
        pthread_mutex_unlock(&s->shared.mutex);
    }
}

ckd_status session_device_check(ckd_session *s, const session_slot *slot, ckd_error *err) {
    pthread_mutex_lock(&s->shared.mutex);
    ckd_status status = err_from(err, slot->device_status, &slot->device_error);
    pthread_mutex_unlock(&s->shared.mutex);
    return status;
}

ckd_status session_device_read(ckd_tensor *t, ckd_device *device, const session_slot *slot,
                               const session_item *item, ckd_error *err) {
    ckd_status status = device_snapshot_read(&t->data, device, slot->devices, item->on_devices, err);
    t->device = device->struct_size ? device : NULL;
    return status;
}

ckd_status session_read_samples(const ckd_session *s, const session_slot *slot, const session_sample *samples,
                                size_t count, ckd_error *err) {
    device_sample *there = s->device_count > 0 ? calloc(count + 1, sizeof(*there)) : NULL;
    size_t on_devices = 0;
    if (s->device_count > 0 && !there) {
        return err_nomem(err, count * sizeof(*there), "samples of a snapshot");
    }
    for (size_t i = 0; i < count; i++) {
        const session_sample *sample = &samples[i];
        const session_item *item = &s->items[sample->item];
        if (item->on_device) {
            there[on_devices++] = (device_sample){item->on_devices, sample->at, sample->bytes, sample->to};
        } else {
            const uint8_t *data = snapshot_read(slot->snapshot, sample->item);
            memcpy(sample->to, data + sample->at, sample->bytes);
        }
    }
    ckd_status status =
        on_devices > 0 ? device_snapshot_sample(slot->devices, there, on_devices, err) : CKD_OK;
    free(there);
    return status;
}
