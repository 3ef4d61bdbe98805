/*
 * The interface of peers/ for other rooms: agents of other nodes, and the bytes that they keep for this one. README.md
 * has an overview.
 */
#ifndef PEERS_PEERS_H
#define PEERS_PEERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

#define PEER_NAME_MAX   128 /* bytes of HOST:PORT */
#define PEER_DOMAIN_MAX 63
#define PEER_HOSTS_MAX  1024
#define PEER_SET_MAX    160 /* bytes of a set's name */
#define PEER_BLOB_MAX   255 /* bytes of a blob's name */
#define PEER_SECRET_MAX 256
#define PEER_SECRET_MIN 16

/* ---- hosts.c: who there is, and who keeps copies for whom ---- */

typedef struct peer_host {
    char name[PEER_NAME_MAX + 1]; /* HOST:PORT, as the list has it */
    char host[PEER_NAME_MAX + 1]; /* without brackets */
    uint16_t port;
    char domain[PEER_DOMAIN_MAX + 1]; /* what fails together; "": the host by itself */
} peer_host;

typedef struct peer_hosts {
    peer_host *items;
    size_t count, self; /* self: this node's */
} peer_hosts;

/*
 * Reads a list: a file with a line `HOST:PORT [domain=NAME]` for each node, or HOST:PORT,HOST:PORT,... itself. self:
 * this node's HOST:PORT; NULL: the entry whose address this machine has. Errors: NOT_FOUND (no such file), INVALID (the
 * line that is wrong; no entry is this node's, or several are), IO, NOMEM.
 */
ckd_status peer_hosts_read(peer_hosts *out, const char *list, const char *self, ckd_error *err);
/* A list of this node alone, under the machine's name. Errors: NOMEM. */
ckd_status peer_hosts_alone(peer_hosts *out, ckd_error *err);
void peer_hosts_free(peer_hosts *hosts);
/*
 * Chooses the nodes that keep copies for node `of`, at most `copies`, among those that `usable` accepts (NULL: all).
 * Nodes form groups of copies + 1 whose members keep copies for each other. A member that is not usable is replaced by
 * the next node in the order of groups. Nodes of other domains come first. Every node computes the same. Returns how
 * many.
 */
typedef bool (*peer_usable_fn)(void *context, size_t host);
size_t peer_hosts_partners(size_t *out, const peer_hosts *hosts, size_t of, size_t copies,
                           peer_usable_fn usable, void *context);
/*
 * Finds the group of node `of`, itself included: `size` nodes, of different domains where that is possible. The last
 * group takes what is left over, and has up to 2 * size - 1. Every node computes the same, in the same order. Returns
 * how many there are; 0: the list has fewer than `size`.
 */
size_t peer_hosts_group(size_t *out, const peer_hosts *hosts, size_t of, size_t size);

/* ---- secret.c ---- */
typedef struct peer_secret {
    uint8_t data[PEER_SECRET_MAX];
    size_t size;
} peer_secret;
/*
 * Reads a file that only its owner may read. Errors: NOT_FOUND, READ_ONLY (others may read it), INVALID (its size), IO.
 */
ckd_status peer_secret_read(peer_secret *out, const char *path, ckd_error *err);

/* ---- blobs.c: what this node keeps for others ---- */
typedef struct blob_entry {
    char name[PEER_BLOB_MAX + 1];
    uint64_t size;
    hash128 hash; /* of its packets' hashes */
} blob_entry;
typedef struct blob_list {
    blob_entry *items;
    size_t count;
} blob_list;
void blob_list_free(blob_list *list);
/* Computes the hash of a file as blob_entry has it. Errors: NOT_FOUND, IO, NOMEM. */
ckd_status blob_file_hash(blob_entry *out, const char *path, ckd_error *err);

/* ---- node.c: this node among the others ---- */

/*
 * Answers a query of another node's agent; `answer` is sent with the status. It runs on the thread of a connection,
 * several at a time.
 */
typedef ckd_status (*peer_answer_fn)(void *context, bytes *answer, const bytes *query, ckd_error *err);
/* A peer has come (alive) or gone. Runs on the peer's thread. */
typedef void (*peer_change_fn)(void *context, size_t host, bool alive, const char *why);

/* Does training need the network and the memory now? Called by threads that send blobs. */
typedef bool (*peer_busy_fn)(void *context);

typedef struct peer_options {
    const peer_hosts *hosts;   /* the caller keeps it until peer_node_end */
    const peer_secret *secret; /* NULL: no other node may connect, and there are none */
    const char *folder;        /* keeps blobs below it: it is emptied at the start */
    uint64_t budget_bytes;     /* of all blobs together */
    uint64_t bytes_per_s;      /* of blobs sent; 0: no limit */
    uint32_t silence_ms;       /* a peer that shows no sign of life for that long is gone; 0: 5000 */
    peer_answer_fn answer;
    peer_change_fn on_change;
    peer_busy_fn is_busy; /* blobs wait meanwhile, but each MiB at most 100 ms; NULL: they never do */
    void *context;
} peer_options;

typedef struct peer_node peer_node;
/*
 * Listens at this node's address and begins to look for the others. Errors: UNSUPPORTED (no libcrypto on this
 * machine; the message says what to install), INVALID, IO (the address is in use), NOMEM.
 */
ckd_status peer_node_begin(peer_node **out, const peer_options *options, ckd_error *err);
/* Breaks off copies that are being sent; other calls go on. */
void peer_node_stop_sending(peer_node *node);
/* Limits the time for answers that take long, from the first call on. */
void peer_node_hurry(peer_node *node);
/* Breaks off whatever is going on with peers; calls fail with CANCELLED from then on. */
void peer_node_stop(peer_node *node);
void peer_node_end(peer_node *node); /* stops first; accepts NULL */

/* Does the peer show signs of life? A node counts as alive for itself. */
bool peer_alive(const peer_node *node, size_t host);
/* Returns how long ago a peer that was alive was found silent; 0: it is alive, or never was. */
uint64_t peer_silence_ns(const peer_node *node, size_t host);
/* Returns the time for which a silent peer may be busy, and come back: four times silence_ms. */
uint64_t peer_patience_ns(const peer_node *node);
/* Has each peer answered or been given up at least once? Waits for that. */
void peer_node_await_first_look(peer_node *node);
/* Waits for the peers that have fallen silent only recently: they may be busy. Waits for silence_ms at most. */
void peer_node_await_recent(peer_node *node);

/*
 * Calls on one peer. One at a time is under way to each peer, others wait. Errors of all: IO (it cannot be reached or
 * has gone), BUSY (no sign of life for silence_ms), READ_ONLY (it has another secret), CORRUPT (bytes have changed on
 * their way, or where they were kept), UNSUPPORTED (another version), CANCELLED, NOMEM.
 */
typedef struct peer_range {
    uint64_t offset, size;
} peer_range;
typedef struct peer_copy {
    const char *set, *blob;  /* where the peer keeps it */
    const char *path;        /* the file here */
    const peer_range *range; /* of the file; NULL: all of it */
} peer_copy;
/*
 * Sends a file, or a part of it, unless the peer has it. sent: bytes that travelled. Also NOSPACE (its budget), and
 * errors of reading.
 */
ckd_status peer_put(uint64_t *sent, peer_node *node, size_t host, const peer_copy *copy, ckd_error *err);
/* Gets a blob into a new file, which is removed after a failure. Also NOT_FOUND, EXISTS, NOSPACE. */
ckd_status peer_fetch(peer_node *node, size_t host, const char *set, const char *blob, const char *path,
                      ckd_error *err);
/* Lists a set; one that the peer does not have is empty. Release with blob_list_free. */
ckd_status peer_list(blob_list *out, peer_node *node, size_t host, const char *set, ckd_error *err);
/* Removes a blob, or with blob "" the whole set. One that is not there is no error. */
ckd_status peer_delete(peer_node *node, size_t host, const char *set, const char *blob, ckd_error *err);
/*
 * Asks the peer's answer function. Also errors of that function. takes_long: the answer may take as long as the peer
 * lives, but after peer_node_hurry ten times silence_ms; else it may take that (BUSY).
 */
ckd_status peer_ask(bytes *answer, peer_node *node, size_t host, const bytes *query, bool takes_long,
                    ckd_error *err);
/* As peer_ask, but over the connection of the other calls: for many queries that have to follow each other. */
ckd_status peer_ask_in_turn(bytes *answer, peer_node *node, size_t host, const bytes *query, bool takes_long,
                            ckd_error *err);

/* ---- files that this node keeps for others ---- */

/* Returns the bytes of all files. */
uint64_t peer_held_bytes(peer_node *node);
/* Names of the sets. Release with free of each and of the array. */
ckd_status peer_held_sets(char ***out, size_t *count, peer_node *node, ckd_error *err);
/* The folder of a set. The set does not change until peer_set_release. Errors: NOT_FOUND. */
ckd_status peer_set_hold(char *path, size_t capacity, peer_node *node, const char *set, ckd_error *err);
void peer_set_release(peer_node *node);
/*
 * Finds the file of a blob. It stays until somebody replaces or removes the blob. Errors: NOT_FOUND, CORRUPT (it has
 * changed since it arrived), IO, NOMEM.
 */
ckd_status peer_held_file(char *path, size_t capacity, peer_node *node, const char *set, const char *blob,
                          ckd_error *err);
/*
 * Keeps a file of this node's own as a blob, as if it had arrived. The file is moved, so it must be on the file system
 * of peer_options.folder; it is removed after a failure. Errors: NOSPACE (the budget), INVALID (a name), IO, NOMEM.
 */
ckd_status peer_keep(peer_node *node, const char *set, const char *blob, const char *path, ckd_error *err);
/* Removes a blob, or with blob "" the whole set. One that is not there is no error. */
ckd_status peer_held_remove(peer_node *node, const char *set, const char *blob, ckd_error *err);

/* Removes all blobs of a set below a folder, which is the beginning of their names. */
void peer_held_remove_below(peer_node *node, const char *set, const char *folder);

/* A condition with waits that end after some time, whatever happens to the date of the machine. */
void peer_condition_init(pthread_cond_t *c);
void peer_condition_wait_s(pthread_cond_t *c, pthread_mutex_t *mutex, unsigned seconds);

/* Removes everything below a folder, as far as that succeeds, at most `depth` folders deep. The folder stays. */
void peer_remove_below(const char *path, unsigned depth);

#endif
