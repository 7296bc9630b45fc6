/* A batch with two members, and jobs that wait for it: ends, edges, slots, reports.
 *
 * Each Redis script is one atomic step. Between two steps anybody may stop for any time. By default a producer adds both
 * members: job 0 in the home queue and job 1 in another queue. With -DCHILD it adds job 0, which adds job 1 while it
 * runs. With -DHELD there is no batch: a held job waits for both, in two other queues. With -DREUSED a report for an
 * earlier target of the same id is still on its way, with -DAGAIN another process opens the batch, too. Each of the other
 * flags takes one guard away: Spin then shows the failure. See README.md.
 *
 * Time: `old` is set when a slot has been reserved for 10 minutes. A job is stored before that, or not at all.
 */

#ifdef CHILD
#define ATTEMPTED_TWICE 0
#elif defined(HELD)
#define ATTEMPTED_TWICE NOBODY   /* the target makes no difference to that */
#else
#define ATTEMPTED_TWICE 1
#endif
#define NOBODY 255
#define EARLIER 1                /* the nonce of an earlier target with this id */
#define FIRST 2                  /* that of this one */

mtype = { none, absent, waiting, running, ended, open, sealed, cancelled, failed, abandoned, held, over, done, dead, lost };

/* The sources: two jobs. */
mtype job[2] = absent;
mtype how[2] = none;
byte edge[2];                    /* `sources`, `edges`: the nonce in its edge; 0: it has none */
byte fence[2];
chan reports[2] = [2] of { mtype, byte };   /* `reports:DEST` in the queue of the source: HOW, nonce */

/* The target: two slots. */
bool slot[2];                    /* `batch:members`, `held:open`: it has not ended */
byte stamp[2];                   /* changes when the slot is reserved again */
bool old[2];
byte open_count;                 /* OPEN */
byte nonce = FIRST;
bool bad = false;                /* DEAD, OTHER: an end that is no success */
mtype state = none;              /* of the batch, or of the held job */

/* What waits for the batch; with -DHELD only the first is used: the held job itself. */
#define ON_DONE 0
#define ON_END 1
#define ON_DEAD 2
mtype callback[3] = none;
byte fired[3];
bool was_sealed = false;
bool died = false;
bool when_done = false;          /* of the held job: WHEN is 'done', or 'ended' */

/* The attempt that has lost its job. */
byte lost_job;
byte lost_fence;
bool lost_at;                    /* it has a number for a child, and has not stored it */

#define alive(m) (job[m] == waiting || job[m] == running)
#define has_ended (state == done || state == failed || state == abandoned)

inline fire(c) {
  callback[c] = over; fired[c]++;
  if
  :: c == ON_DONE -> printf("> on_done becomes ready\n")
  :: c == ON_END -> printf("> on_end becomes ready\n")
  :: c == ON_DEAD -> printf("> on_dead becomes ready\n")
  fi;
  assert(fired[c] == 1);                         /* at most once */
  assert(c == ON_DEAD || was_sealed);            /* not before the seal */
  assert(c == ON_DEAD || !alive(0) && !alive(1));/* not before every member that exists has ended */
  assert(c != ON_DONE || !bad && how[0] != dead && how[1] != dead && how[0] != cancelled && how[1] != cancelled)
}

#ifdef HELD

inline hold(its_nonce) {
  nonce = its_nonce; state = held; open_count = 2; bad = false;
  slot[0] = true; slot[1] = true; old[0] = false; old[1] = false; stamp[0] = its_nonce; stamp[1] = its_nonce;
  printf("> the job is held, nonce %d\n", its_nonce)
}

inline take_hold() {
  state = over; slot[0] = false; slot[1] = false
}

/* flows.meet */
inline count(m, its_nonce, its_how) {
  if
#ifdef NONCELESS
  :: state == held && slot[m] ->
#else
  :: state == held && slot[m] && its_nonce == nonce ->
#endif
     slot[m] = false; open_count--; printf("> dependency %d counts as %e\n", m, its_how);
     if
     :: when_done && its_how != done -> take_hold()
     :: else ->
        if
        :: open_count == 0 ->
           take_hold(); fired[0]++; printf("> the held job becomes ready\n");
           assert(fired[0] == 1);
           assert(!alive(0) && !alive(1));
           assert(!when_done || how[0] == done && how[1] == done)
        :: else -> skip
        fi
     fi
  :: else -> skip
  fi
}

#else

/* batches.finish */
inline finish(its_how) {
  state = its_how; printf("> the batch ends as %e\n", state);
  if
  :: callback[ON_DONE] == held && state == done -> fire(ON_DONE)
  :: callback[ON_DONE] == held && state != done -> callback[ON_DONE] = over
  :: else -> skip
  fi;
  if
  :: callback[ON_END] == held && state != abandoned -> fire(ON_END)
  :: callback[ON_END] == held && state == abandoned -> callback[ON_END] = over
  :: else -> skip
  fi;
  if
  :: callback[ON_DEAD] == held -> callback[ON_DEAD] = over
  :: else -> skip
  fi
}

inline finish_if_over() {
  if
#ifdef UNSEALED
  :: has_ended || open_count > 0 -> skip
#else
  :: has_ended || state == open || open_count > 0 -> skip
#endif
  :: else -> finish((state == cancelled || bad -> failed : done))
  fi
}

/* batches.end_member */
inline count(m, its_nonce, its_how) {
  if
#ifdef COUNTED_TWICE
  :: its_nonce == nonce && open_count > 0 ->
#elif defined(NONCELESS)
  :: slot[m] ->
#else
  :: slot[m] && its_nonce == nonce ->
#endif
     slot[m] = false; open_count--; printf("> member %d counts as %e\n", m, its_how);
     if
     :: its_how != done -> bad = true
     :: else -> skip
     fi;
     if
     :: its_how == dead && !died -> died = true;
        if
        :: callback[ON_DEAD] == held -> fire(ON_DEAD)
        :: else -> skip
        fi
     :: else -> skip
     fi;
     finish_if_over()
  :: else -> skip
  fi
}

/* enqueue of a callback, batches.connect. A callback that has ended is not live: only the batch remembers it. */
inline add_callback(c) {
  if
  :: callback[c] == none -> connect(c)
#ifdef FORGETFUL
  :: callback[c] == over -> connect(c)
#endif
  :: else -> skip
  fi
}

inline connect(c) {
  if
  :: c == ON_DEAD && died || c == ON_END && has_ended && state != abandoned || c == ON_DONE && state == done -> fire(c)
  :: else ->
     if
     :: has_ended -> callback[c] = over
     :: else -> callback[c] = held
     fi
  fi
}

/* add_members */
inline reserve(m) {
  slot[m] = true; old[m] = false; stamp[m]++; open_count++; printf("> number %d is reserved\n", m)
}

#endif

/* The reports of an earlier target with this id are still on their way. */
inline earlier_reports() {
#ifdef REUSED
  reports[1]!done, EARLIER
#else
  skip
#endif
}

/* flows.end_jobs: the edge is followed in the step that ends its source. */
inline end_job(m) {
  job[m] = ended; fence[m] = 0; printf("> job %d ends as %e\n", m, how[m]);
  if
  :: edge[m] -> followed = edge[m]; edge[m] = 0;
#ifndef HELD
     if
     :: m == 0 -> count(0, followed, how[0])   /* it is in the home queue */
     :: else -> reports[m]!how[m], followed
     fi;
#else
     reports[m]!how[m], followed;
#endif
     followed = 0
  :: else -> skip
  fi
}

/* enqueue of a source with its edge. It must come before 10 minutes have passed. */
inline store(m, its_nonce) {
  if
#ifdef SLOW
  :: atomic { job[m] == absent ->
#else
  :: atomic { job[m] == absent && !old[m] ->
#endif
       job[m] = waiting; printf("> job %d is stored\n", m);
       assert(!fired[ON_DONE] && !fired[ON_END]);
#ifndef EDGELESS
       edge[m] = its_nonce
     }
#else
       skip
     };
     if
     :: atomic { job[m] != ended -> edge[m] = its_nonce }
     :: skip                     /* the producer dies */
     fi
#endif
  :: atomic { else -> skip }
  fi
}

/* Only the attempt that runs now ends the job. */
inline settle(m, its_fence) {
  if
  :: job[m] == running && fence[m] == its_fence ->
     if
     :: how[m] = done
     :: how[m] = dead
     fi;
     end_job(m)
  :: else -> printf("> the settle of job %d is refused\n", m)
  fi
}

/* The supervisor takes the job from its worker, which is dead, or frozen: then it goes on as a zombie. */
inline take_away(m) {
  lost_job = m; lost_fence = mine; lost_at = number; job[m] = waiting; printf("> job %d is returned\n", m)
}

/* The handler of the first member adds the other one, in each attempt. */
inline reserve_child() {
#ifdef CHILD
  if
  :: _pid == 0 && slot[0] && (state == open || state == sealed) && stamp[1] == 0 -> number = true; reserve(1)
  :: _pid == 0 && slot[0] && (state == open || state == sealed) && stamp[1] > 0 && slot[1] -> number = true;
     old[1] = false; stamp[1]++; printf("> number 1 is reserved again\n")
  :: else -> skip
  fi
#else
  skip
#endif
}

active [2] proctype worker() {   /* worker 0 runs job 0, worker 1 job 1 */
  byte mine, followed;
  bool number;
end:
  do
  :: atomic { job[_pid] == waiting -> job[_pid] = running; fence[_pid]++; mine = fence[_pid];
       printf("> job %d begins, attempt %d\n", _pid, mine); reserve_child() };
     if
     :: atomic { _pid == ATTEMPTED_TWICE && !lost_fence -> take_away(_pid); mine = 0 }
     :: number -> store(1, FIRST)
     :: true -> skip                             /* with CHILD: its handler fails before that */
     fi;
     atomic {
       if
       :: mine -> settle(_pid, mine)
       :: else -> skip
       fi;
       number = false; mine = 0
     }
  :: atomic { job[_pid] == ended -> break }
  od
}

active proctype zombie() {
  byte followed;
end:
  lost_fence;
  if
  :: lost_at -> store(1, FIRST)
  :: true -> skip
  fi;
  atomic { settle(lost_job, lost_fence) }
}

inline forget(m) {
  if
  :: reports[m]?[eval(its_how), eval(its_nonce)] -> reports[m]?_, _; printf("> a pulse removes the report of job %d\n", m)
  :: else -> skip
  fi
}

inline read_report() {
  if
  :: nempty(reports[0]) -> m = 0
  :: nempty(reports[1]) -> m = 1
  fi;
  reports[m]?<its_how, its_nonce>
}

/* Reports.deliver: reads, delivers, and removes what it has read if that is still the head of the list. */
active proctype pulse() {
  mtype its_how = none;
  byte m, its_nonce;
end:
  do
  :: atomic { read_report(); printf("> a pulse delivers the report of job %d\n", m); reports[m]?_, _;
       count(m, its_nonce, its_how); m = 0; its_nonce = 0; its_how = none }
  od
}

/* Another pulse, once: it may stop after each of these steps for any time, or die. */
active proctype other_pulse() {
  mtype its_how = none;
  byte m, its_nonce;
end:
  atomic { read_report() };
#ifdef REMOVED_FIRST
  atomic { forget(m) };
#endif
  if
  :: atomic { printf("> another pulse delivers the report of job %d\n", m); count(m, its_nonce, its_how) }
  :: atomic { true -> printf("> another pulse dies\n"); goto dies }
  fi;
#ifndef REMOVED_FIRST
  if
  :: atomic { forget(m) }
  :: atomic { true -> printf("> another pulse dies\n") }
  fi;
#endif
dies:
  atomic { m = 0; its_nonce = 0; its_how = none }
}

/* batches.tend. `UNDATED`: the batch was sealed 10 minutes ago, whenever this number was reserved. */
#ifdef UNVERIFIED
#define to_verify(m) false
#elif defined(UNDATED)
#define to_verify(m) (slot[m] && old[0] && (state == sealed || state == cancelled))
#else
#define to_verify(m) (slot[m] && old[m] && (state == sealed || state == cancelled || state == held))
#endif
#ifdef UNPENDING
#define is_gone (edge[m] != its_nonce)
#else
#define is_gone (edge[m] != its_nonce && empty(reports[m]))
#endif
#ifdef UNSTAMPED
#define is_meant true
#else
#define is_meant (stamp[m] == seen)
#endif

/* Reports.verify: asks the queue of the source, and then ends the slot. */
active proctype verifier() {
  byte m, seen, its_nonce;
end:
  do
  :: atomic { to_verify(m) -> seen = stamp[m]; its_nonce = nonce };
     if
     :: atomic { is_gone -> printf("> verify: job %d is gone\n", m) };
        atomic {
          if
          :: slot[m] && is_meant -> printf("> lose: job %d\n", m);
             assert(job[m] == absent);           /* nothing is lost that was stored */
             count(m, nonce, lost)
          :: else -> skip
          fi
        }
     :: atomic { else -> skip }
     fi;
     atomic { seen = 0; its_nonce = 0; m = 1 - m }
  :: atomic { !to_verify(m) && to_verify(1 - m) -> m = 1 - m }
  od
}

active proctype clock() {
end:
  do
#ifdef CHILD
  :: atomic { slot[0] && !old[0] -> old[0] = true; printf("> number 0 is 10 minutes old\n") }
  :: atomic { slot[1] && !old[1] -> old[1] = true; printf("> number 1 is 10 minutes old\n") }
#else
  :: atomic { (slot[0] && !old[0] || slot[1] && !old[1]) -> old[0] = true; old[1] = true; printf("> 10 minutes pass\n") }
#endif
#ifndef HELD
  :: atomic { state == open -> finish(abandoned) }
#endif
  od
}

#ifdef HELD

active proctype producer() {
  atomic { hold(FIRST);
    if
    :: when_done = true
    :: skip
    fi;
    earlier_reports() };
  if
  :: true -> store(0, FIRST); 
     if
     :: true -> store(1, FIRST)
     :: true -> skip                             /* it dies */
     fi
  :: true -> skip
  :: atomic { state == held -> take_hold(); printf("> the held job is cancelled\n") };
     atomic { hold(FIRST + 1) };
     store(0, FIRST + 1); store(1, FIRST + 1)
  fi
}

active proctype canceller() {
  if
  :: atomic { state == held -> take_hold(); printf("> the held job is cancelled\n") }
  :: true -> skip
  fi
}

ltl ends { <> [] (state == over) }

#else

active proctype producer() {
  bool added;
  atomic { state = open; earlier_reports() };
  atomic { add_callback(ON_DONE); add_callback(ON_END); add_callback(ON_DEAD) };
  atomic {
    if
    :: state == open -> added = true; reserve(0);
#ifndef CHILD
       reserve(1)
#endif
    :: else -> skip
    fi
  };
  if
  :: added -> store(0, FIRST);
#ifndef CHILD
     if
     :: true -> store(1, FIRST)
     :: true -> goto dies
     fi
#endif
  :: true -> goto dies
  fi;
  if
  :: atomic { true ->
       if
       :: state == open -> state = sealed; was_sealed = true; printf("> the batch is sealed\n"); finish_if_over()
       :: else -> skip
       fi }
  :: true -> skip
  fi;
dies:
  skip
}

#ifdef AGAIN
/* Another process opens the same batch. */
active proctype opener() {
  if
  :: atomic { state == open -> printf("> another process opens the batch\n") };
     atomic { add_callback(ON_DONE); add_callback(ON_END); add_callback(ON_DEAD) };
  :: true -> skip
  fi
}

#endif

inline cancel_member(m) {
  if
  :: slot[m] && job[m] == waiting && edge[m] == nonce -> how[m] = cancelled; end_job(m)
  :: else -> skip
  fi
}

active proctype canceller() {
  byte m, followed;
  if
  :: atomic { state == open || state == sealed ->
       state = cancelled; was_sealed = true; printf("> the batch is cancelled\n"); finish_if_over() };
     do
     :: atomic { m < 2 -> cancel_member(m); m++ }
     :: else -> break
     od
  :: true -> skip
  fi
}

ltl ends { <> has_ended }

#endif
