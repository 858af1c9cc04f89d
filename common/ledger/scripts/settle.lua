-- settle: count samples whose records are durable in a segment, each once.
-- KEYS: state done attempts queued leases owners payloads tries lengths flags segments suspects prompts lost conversations answers resumed stopped recent
-- ARGV: segment committed_bytes rebuild samples...
--   segment, committed_bytes: the file, and its length up to which every record is settled by this call; it is noted
--   only if all records count, since a caller that dies before it has voided the others must leave them to be found
--   rebuild: 1 when the ledger is built anew from the segments: the attempt may be older than the current one
--   samples: (index attempt prompt_tokens completion_tokens cached_tokens bucket flags left answer recent) each; flags
--   joined by commas; one with the flag uncounted is not charged. recent: what the gates' window keeps of it beside
--   the time (_recent.py), empty in a rebuild. left: the turns of its conversation that are still to come, empty where it is no turn of one or where that
--   is known already; answer: what the next of them is to follow (packed output_ids), empty if it was truncated
-- ANSWERS: one entry a sample: 1 it counts (also when asked again), 0 superseded by another attempt: void its record
-- An attempt that the ledger does not know is newer than all it knows: Redis lost its last second. It counts. An older
-- one never does: its worker may have been told so, and be about to void the record.
local answers, removed, notes, buckets, flags = {}, {}, {}, {}, {}
local superseded = 0
local samples, prompt, completion, cached, squares, most = 0, 0, 0, 0, 0, 0
local free, free_prompt, free_completion = 0, 0, 0
local recent = {}
local KEPT = 1024 -- the answers that the window keeps
for at = 4, #ARGV, 10 do
  local index, attempt = ARGV[at], tonumber(ARGV[at + 1])
  local last = redis.call('GETRANGE', KEYS[3], index * 6, index * 6 + 5)
  local current = #last == 6 and struct.unpack('>I6', last) or 0
  local is_done = redis.call('GETBIT', KEYS[2], index) == 1
  if is_done or (ARGV[3] ~= '1' and attempt < current) then
    answers[#answers + 1] = current == attempt and 1 or 0
    superseded = superseded + (current == attempt and 0 or 1)
  else
    -- In a rebuild this may go down: an attempt that is still in flight then gets 0, and its record is voided.
    if current ~= attempt then redis.call('SETRANGE', KEYS[3], index * 6, struct.pack('>I6', attempt)) end
    redis.call('SETBIT', KEYS[2], index, 1)
    local tokens = tonumber(ARGV[at + 3])
    samples = samples + 1
    prompt = prompt + tonumber(ARGV[at + 2])
    completion = completion + tokens
    cached = cached + tonumber(ARGV[at + 4])
    squares = squares + tokens * tokens
    most = math.max(most, tokens)
    buckets[ARGV[at + 5]] = (buckets[ARGV[at + 5]] or 0) + 1
    for flag in string.gmatch(ARGV[at + 6], '[^,]+') do
      flags[flag] = (flags[flag] or 0) + 1
      if flag == 'uncounted' then
        free = free + 1
        free_prompt = free_prompt + tonumber(ARGV[at + 2])
        free_completion = free_completion + tokens
      end
    end
    if ARGV[at + 9] ~= '' then recent[#recent + 1] = ARGV[at + 9] end
    removed[#removed + 1] = index
    notes[#notes + 1] = KEYS[5] .. ' ' .. index
    answers[#answers + 1] = 1
    local left, answer = ARGV[at + 7], ARGV[at + 8]
    if left ~= '' and left ~= '0' and answer ~= '' then
      -- Where the ledger was built anew the feed has to read the row again before it can go on with it.
      local known = redis.call('HEXISTS', KEYS[15], index) == 1
      redis.call('HSET', known and KEYS[16] or KEYS[17], index, answer)
    elseif left ~= '' then
      if left ~= '0' then redis.call('HINCRBY', KEYS[18], 'truncated', left) end
      redis.call('HDEL', KEYS[15], index)
    end
  end
end
if samples > 0 then
  redis.call('HINCRBY', KEYS[1], 'done', samples)
  redis.call('HINCRBY', KEYS[1], 'prompt_tokens', prompt)
  redis.call('HINCRBY', KEYS[1], 'completion_tokens', completion)
  redis.call('HINCRBY', KEYS[1], 'cached_tokens', cached)
  redis.call('HINCRBY', KEYS[1], 'squared_tokens', squares)
  if free > 0 then
    redis.call('HINCRBY', KEYS[1], 'uncounted', free)
    redis.call('HINCRBY', KEYS[1], 'uncounted_prompt_tokens', free_prompt)
    redis.call('HINCRBY', KEYS[1], 'uncounted_completion_tokens', free_completion)
  end
  if most > tonumber(redis.call('HGET', KEYS[1], 'max_tokens') or '0') then
    redis.call('HSET', KEYS[1], 'max_tokens', most)
  end
  for bucket, n in pairs(buckets) do redis.call('HINCRBY', KEYS[9], bucket, n) end
  for flag, n in pairs(flags) do redis.call('HINCRBY', KEYS[10], flag, n) end
  redis.call('ZREM', KEYS[4], unpack(removed))
  redis.call('ZREM', KEYS[5], unpack(removed))
  redis.call('HDEL', KEYS[6], unpack(removed))
  redis.call('HDEL', KEYS[7], unpack(removed))
  redis.call('HDEL', KEYS[8], unpack(removed))
  redis.call('HDEL', KEYS[12], unpack(notes))
  redis.call('HDEL', KEYS[13], unpack(removed))
  redis.call('HDEL', KEYS[14], unpack(removed))
end
if #recent > 0 then
  local t = redis.call('TIME')
  local now = struct.pack('>d', t[1] * 1000 + math.floor(t[2] / 1000))
  local size = #now + #recent[1]
  local first = redis.call('HINCRBY', KEYS[1], 'recent', #recent) - #recent
  for i, one in ipairs(recent) do redis.call('SETRANGE', KEYS[19], (first + i - 1) % KEPT * size, now .. one) end
end
if superseded == 0 and ARGV[1] ~= '' and tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[11], ARGV[1]) or '0') then
  redis.call('HSET', KEYS[11], ARGV[1], ARGV[2])
end
return answers
