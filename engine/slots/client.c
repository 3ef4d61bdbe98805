/* The side of an agent's connection that asks: sessions, and programs that want to know how an agent is. */
#include "engine/slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/hash.h"

/* One place for the user's agents, whatever a login, a batch job or a launcher sets in the environment. */
static ckd_status usual_path(char out[LOCAL_PATH_MAX + 1], const char *store, ckd_error *err) {
    char folder[64], *resolved = realpath(store, NULL);
    if (!resolved) {
        return err_set(err, CKD_E_NOT_FOUND, "there is no store at %s, so it has no agent", store);
    }
    snprintf(folder, sizeof(folder), "/tmp/ckptdelta-%lu", (unsigned long)geteuid());
    snprintf(out, LOCAL_PATH_MAX + 1, "%s/%016llx.agent", folder,
             (unsigned long long)hash64(resolved, strlen(resolved)));
    free(resolved);
    return local_private_folder(folder, err);
}

ckd_status slots_socket_path(char out[LOCAL_PATH_MAX + 1], const char *store, const char *where,
                             ckd_error *err) {
    if (!where || strcmp(where, "auto") == 0 || strcmp(where, "1") == 0) {
        return usual_path(out, store, err);
    }
    if (where[0] != '/' || strlen(where) > LOCAL_PATH_MAX) {
        return err_set(err, CKD_E_INVALID,
                       "an agent is 'auto' or the absolute path of its socket, at most %d bytes, not '%s'",
                       LOCAL_PATH_MAX, where);
    }
    snprintf(out, LOCAL_PATH_MAX + 1, "%s", where);
    return CKD_OK;
}

ckd_status slots_ask(slot_message *answer, slot_reply *reply, int fd, const slot_message *request,
                     ckd_error *err) {
    *answer = (slot_message){.fd_count = 0};
    ckd_status status = slot_message_send(fd, request, err);
    THEN(status, slot_message_receive(answer, fd, err));
    THEN(status, slot_message_get(reply, sizeof(*reply), answer, err));
    if (status != CKD_OK) {
        slot_message_free(answer);
        return status;
    }
    return err_from(err, reply->status, &reply->error);
}

ckd_status slots_connect(int *out, const char *path, const char *run, ckd_error *err) {
    slot_hello hello;
    memset(&hello, 0, sizeof(hello));
    hello.protocol = SLOT_PROTOCOL;
    hello.request_bytes = sizeof(slot_request);
    snprintf(hello.version, sizeof(hello.version), "%s", ckd_version());
    snprintf(hello.run, sizeof(hello.run), "%s", run);
    slot_message request = {.kind = SLOT_HELLO}, answer;
    slot_reply reply;
    ckd_status status = local_connect(out, path, err);
    if (status != CKD_OK) {
        return status;
    }
    bytes_put(&request.body, &hello, sizeof(hello));
    status = slots_ask(&answer, &reply, *out, &request, err);
    slot_message_free(&answer);
    slot_message_free(&request);
    if (status != CKD_OK) {
        local_close(*out);
        *out = -1;
    }
    return status;
}
