/*
 * Connections between nodes. Each is a socket. Where both sides have a faster network, UCX carries the bytes once the
 * secret is proved, and the socket only tells that the peer is gone.
 */
#include "peers/internal.h"

#include <stdlib.h>

#include "base/local_socket.h"

struct wire {
    ucx_net *net; /* NULL: none */
    int socket;
    ucx_link *link; /* NULL: none */
    bool switched;  /* the link carries the bytes */
    wire_limits limits;
};

static ckd_status wire_make(wire **out, ucx_net *net, int socket, ckd_error *err) {
    wire *w = calloc(1, sizeof(*w));
    if (!w) {
        local_close(socket);
        return err_nomem(err, sizeof(*w), "a connection");
    }
    *w = (wire){.net = net, .socket = socket, .limits = {.stop = -1}};
    *out = w;
    return CKD_OK;
}

ckd_status wire_connect(wire **out, ucx_net *net, const peer_host *to, const wire_limits *limits,
                        ckd_error *err) {
    int socket;
    ckd_status status = tcp_connect(&socket, to, limits, err);
    THEN(status, wire_make(out, net, socket, err));
    if (status == CKD_OK) {
        (*out)->limits = *limits;
    }
    return status;
}

ckd_status wire_accept(wire **out, ucx_net *net, int listener, int stop, ckd_error *err) {
    int socket;
    ckd_status status = tcp_accept(&socket, listener, stop, err);
    THEN(status, wire_make(out, net, socket, err));
    return status;
}

void wire_close(wire *w) {
    if (w) {
        ucx_link_close(w->link);
        local_close(w->socket);
        free(w);
    }
}

void wire_set_limits(wire *w, const wire_limits *limits) {
    w->limits = *limits;
}

uint64_t wire_origin(const wire *w) {
    return tcp_origin(w->socket);
}

/* ---- a faster network ---- */

static void drop_link(wire *w) {
    ucx_link_close(w->link);
    w->link = NULL;
}

void wire_address(bytes *out, wire *w) {
    bytes_clear(out);
    if (w->net && ucx_link_open(&w->link, out, w->net, w->socket, NULL) != CKD_OK) {
        bytes_clear(out);
    }
}

ckd_status wire_reach(wire *w, const bytes *address, ckd_error *err) {
    ckd_status status = CKD_OK;
    if (w->link && address->size > 0) {
        status = ucx_link_connect(w->link, address, err);
    }
    if (status != CKD_OK || address->size == 0) {
        drop_link(w);
    }
    return status;
}

void wire_switch(wire *w) {
    w->switched = w->link != NULL;
}

/* ---- bytes ---- */

ckd_status wire_send(wire *w, const void *data, size_t size, ckd_error *err) {
    return w->switched ? ucx_send(w->link, data, size, &w->limits, err)
                       : tcp_send(w->socket, data, size, &w->limits, err);
}

static _Atomic(wire_fault_fn) fault_hook; /* tests set it while threads receive */
static _Atomic(void *) fault_context;

void wire_set_fault(wire_fault_fn fault, void *context) {
    atomic_store(&fault_context, context);
    atomic_store(&fault_hook, fault);
}

ckd_status wire_receive(wire *w, void *to, size_t size, ckd_error *err) {
    ckd_status status = w->switched ? ucx_receive(w->link, to, size, &w->limits, err)
                                    : tcp_receive(w->socket, to, size, &w->limits, err);
    wire_fault_fn fault = atomic_load(&fault_hook);
    if (status == CKD_OK && fault) {
        fault(atomic_load(&fault_context), to, size);
    }
    return status;
}
