/* Makes and releases the handle of a store, and answers the questions that all files ask of it. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store/handle.h"

#define DEFAULT_LOCK_TIMEOUT_MS 30000

ckd_status store_new(ckd_store **out, const char *root, ckd_open_mode mode, const ckd_store_options *options,
                     const store_hooks *hooks, ckd_error *err) {
    *out = NULL;
    if (!root || !*root || strlen(root) > PATH_ROOM - 256) {
        return err_set(err, CKD_E_INVALID, "a store's path must have 1 to %d bytes", PATH_ROOM - 256);
    }
    if (mode < CKD_OPEN_READ || mode > CKD_OPEN_CREATE) {
        return err_set(err, CKD_E_INVALID, "unknown open mode %d", (int)mode);
    }
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_store_options", err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_store *store = calloc(1, sizeof(*store));
    if (!store) {
        return err_nomem(err, sizeof(*store), "the store handle");
    }
    store->hooks = hooks;
    store->mode = mode;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_mutex_init(&store->intact.mutex, NULL);
    store->options = o;
    if (store->options.lock_timeout_ms == 0) {
        store->options.lock_timeout_ms = DEFAULT_LOCK_TIMEOUT_MS;
    }
    store->path = strdup(root);
    if (!store->path) {
        ckd_store_close(store);
        return err_nomem(err, strlen(root), "the store's path");
    }
    *out = store;
    return CKD_OK;
}

void ckd_store_close(ckd_store *store) {
    if (!store) {
        return;
    }
    catalog_close(store->catalog);
    free(store->scrubbed.ids);
    pool_destroy(store->pool);
    pthread_mutex_destroy(&store->mutex);
    pthread_mutex_destroy(&store->intact.mutex);
    free(store->intact.records.slots);
    free(store->path);
    store->hooks->close(store);
    free(store);
}

bool store_is_remote(const ckd_store *store) {
    return file_is_remote(path_in(store->path, DIR_CHUNKS).text);
}

static void send_message(const ckd_store *store, ckd_message_fn function, const char *format, va_list args) {
    if (function) {
        char text[1024];
        vsnprintf(text, sizeof(text), format, args);
        function(store->options.message_context, text);
    }
}

void store_message(const ckd_store *store, const char *format, ...) {
    va_list args;
    va_start(args, format);
    send_message(store, store->options.on_message, format, args);
    va_end(args);
}

void store_info(const ckd_store *store, const char *format, ...) {
    const ckd_store_options *o = &store->options;
    va_list args;
    va_start(args, format);
    send_message(store, o->on_info ? o->on_info : o->on_message, format, args);
    va_end(args);
}

ckd_status store_check_repairable(const ckd_store *store, ckd_error *err) {
    if (!store) {
        return err_set(err, CKD_E_INVALID, "there is no store: it is NULL");
    }
    if (store->mode == CKD_OPEN_READ) {
        return err_set(err, CKD_E_READ_ONLY, "store '%s' was opened for reading; open it with CKD_OPEN_WRITE",
                       store->path);
    }
    return CKD_OK;
}

ckd_status store_check_writable(const ckd_store *store, ckd_error *err) {
    ckd_status status = store_check_repairable(store, err);
    if (status == CKD_OK && atomic_load(&store->identity_lost)) {
        status = err_corrupt(err, path_in(store->path, FILE_IDENTITY).text, CKD_NO_OFFSET,
                             "the store's identity is damaged or missing, so nothing is changed: run "
                             "ckptdelta repair %s, which writes it again",
                             store->path);
    }
    return status;
}
